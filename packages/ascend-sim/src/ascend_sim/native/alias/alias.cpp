// Five of the six libraries that torch_npu loads are this file: empty, with a SONAME of their own
// and a dependency on libascendcl.so, so that a dlsym on any of their handles finds our functions.
