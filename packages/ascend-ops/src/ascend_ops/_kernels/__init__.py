"""The operators in each of their forms; see `ascend_ops._backends`."""
