#include "attention_checks.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

namespace ascendsim::kernels {
namespace {

using at::Tensor;

constexpr int64_t kCompressedMask = 2048;

// The sizes of query, key or value.
struct Sizes {
  int64_t batch, heads, length, head_size;
};

bool is_hidden(Layout layout) { return layout == Layout::kBSH || layout == Layout::kSBH; }

void check_options(const AttentionOptions& options) {
  TORCH_CHECK(options.keep_prob > 0 && options.keep_prob <= 1,
              "The keep_prob value must be in range of (0, 1], but got ", options.keep_prob);
  TORCH_CHECK(options.sparse_mode >= kDefaultMask && options.sparse_mode <= 8,
              "The sparse_mode value must be in range of [0,8], but got ", options.sparse_mode);
  TORCH_CHECK(options.pse_type >= kPseMulAdd && options.pse_type <= kPseSlopesSqrt,
              "The pse_type value must be in range of [0,3], but got ", options.pse_type);
  TORCH_CHECK(options.heads > 0, "head_num must be positive, but is ", options.heads);
}

void check_tensors(const AttentionInputs& in, Layout layout) {
  const bool four = layout == Layout::kBNSD || layout == Layout::kBSND;
  const at::ScalarType dtype = in.query.scalar_type();
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat,
              "npu_fusion_attention: query must be float16, bfloat16 or float32, but is ", dtype);
  for (const Tensor* t : {&in.query, &in.key, &in.value}) {
    TORCH_CHECK(t->dim() == (four ? 4 : 3),
                "npu_fusion_attention: query, key and value of this input_layout have ",
                four ? 4 : 3, " dimensions, but got ", t->sizes());
    TORCH_CHECK(t->scalar_type() == dtype,
                "npu_fusion_attention: query, key and value must have one dtype");
    TORCH_CHECK(t->numel() > 0, "npu_fusion_attention: query, key and value cannot be empty, but ",
                "got ", t->sizes());
  }
}

// The heads of a tensor whose layout holds them in one dimension with their elements.
int64_t divided(const char* name, const Tensor& t, const char* what, int64_t by) {
  TORCH_CHECK(t.size(2) % by == 0, "npu_fusion_attention: the last dimension of ", name, " (",
              t.size(2), ") must be a multiple of ", what, " (", by, ")");
  return t.size(2) / by;
}

Sizes sizes_of(const Tensor& t, Layout layout, int64_t heads) {
  switch (layout) {
    case Layout::kBNSD:
      return {t.size(0), t.size(1), t.size(2), t.size(3)};
    case Layout::kBSND:
      return {t.size(0), t.size(2), t.size(1), t.size(3)};
    case Layout::kBSH:
      return {t.size(0), heads, t.size(1), t.size(2) / heads};
    case Layout::kSBH:
      return {t.size(1), heads, t.size(0), t.size(2) / heads};
    case Layout::kTND:
      return {1, t.size(1), t.size(0), t.size(2)};
  }
  TORCH_INTERNAL_ASSERT(false);
}

void check_equal(const char* what, const char* one, int64_t size, const char* other,
                 int64_t other_size) {
  TORCH_CHECK(size == other_size, "npu_fusion_attention: ", one, " and ", other,
              " must have the same ", what, ", but have ", size, " and ", other_size);
}

Geometry check_sizes(const AttentionInputs& in, const AttentionOptions& options) {
  int64_t kv_heads = 0;  // known by the other layouts
  if (is_hidden(options.layout)) {
    const int64_t head_size = divided("query", in.query, "head_num", options.heads);
    kv_heads = divided("key", in.key, "the head size", head_size);
    divided("value", in.value, "the heads of key", kv_heads);
  }
  const Sizes q = sizes_of(in.query, options.layout, options.heads);
  const Sizes k = sizes_of(in.key, options.layout, kv_heads);
  const Sizes v = sizes_of(in.value, options.layout, kv_heads);
  TORCH_CHECK(q.heads == options.heads, "npu_fusion_attention: head_num is ", options.heads,
              ", but query has ", q.heads, " heads in this input_layout");
  check_equal("batch", "query", q.batch, "key", k.batch);
  check_equal("batch", "key", k.batch, "value", v.batch);
  check_equal("number of heads", "key", k.heads, "value", v.heads);
  check_equal("length", "key", k.length, "value", v.length);
  check_equal("head size", "query", q.head_size, "key", k.head_size);
  TORCH_CHECK(q.heads % k.heads == 0, "npu_fusion_attention: the heads of query (", q.heads,
              ") must be a multiple of those of key (", k.heads, ")");
  return {q.batch, q.heads, k.heads, q.length, k.length, q.head_size, v.head_size};
}

// Cumulated lengths; zeros at the end are sequences that take no part.
void check_ends(const char* name, const std::vector<int64_t>& ends, int64_t rows) {
  int64_t last = 0;
  bool over = false;
  for (int64_t end : ends) {
    over = over || (end == 0 && last > 0);
    TORCH_CHECK(over ? end == 0 : end >= last && end <= rows, "npu_fusion_attention: ", name,
                " must be cumulated lengths of at most ", rows, " rows in all, but is ", ends);
    last = std::max(last, end);
  }
}

void check_sequences(const AttentionOptions& options, Geometry& sizes) {
  if (options.layout != Layout::kTND) return;
  TORCH_CHECK(
      !options.q_ends.empty() && options.q_ends.size() == options.kv_ends.size(),
      "the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.");
  check_ends("actual_seq_qlen", options.q_ends, sizes.q_length);
  check_ends("actual_seq_kvlen", options.kv_ends, sizes.kv_length);
  sizes.batch = static_cast<int64_t>(options.q_ends.size());
}

// The longest of the sequences that end at `ends`.
int64_t longest(const std::vector<int64_t>& ends) {
  int64_t most = 0, begin = 0;
  for (int64_t end : ends) {
    most = std::max(most, end - begin);
    begin = end;
  }
  return most;
}

void check_mask(const Tensor& mask, const AttentionOptions& options, const Geometry& sizes) {
  if (!mask.defined()) return;
  TORCH_CHECK(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte,
              "atten_mask must be bool or uint8, but is ", mask.scalar_type());
  const at::IntArrayRef shape = mask.sizes();
  if (options.sparse_mode >= kLeftUpCausal) {
    TORCH_CHECK(shape == at::IntArrayRef({kCompressedMask, kCompressedMask}), "sparse_mode ",
                options.sparse_mode,
                " takes the compressed atten_mask of shape [2048, 2048], but got ", shape);
    return;
  }
  if (options.layout == Layout::kTND) {
    const int64_t s = longest(options.q_ends), t = longest(options.kv_ends);
    TORCH_CHECK(mask.dim() == 2 && shape[0] >= s && shape[1] >= t,
                "atten_mask in layout TND has two dimensions, for the longest sequences [", s, ", ",
                t, "], but got ", shape);
    return;
  }
  const int64_t s = sizes.q_length, t = sizes.kv_length;
  const std::array<std::vector<int64_t>, 4> known{
      {{sizes.batch, sizes.heads, s, t}, {sizes.batch, 1, s, t}, {1, 1, s, t}, {s, t}}};
  TORCH_CHECK(std::find(known.begin(), known.end(), shape) != known.end(),
              "atten_mask must have a shape of [B, N, S, T], [B, 1, S, T], [1, 1, S, T] or [S, T], "
              "which is ",
              known[0], " to ", known[3], ", but got ", shape);
}

void check_slopes(const Tensor& pse, const Geometry& sizes) {
  TORCH_CHECK(pse.scalar_type() == at::kFloat, "pse of pse_type 2 and 3 must be float32, but is ",
              pse.scalar_type());
  const at::IntArrayRef shape = pse.sizes();
  TORCH_CHECK(shape == at::IntArrayRef({sizes.heads}) ||
                  shape == at::IntArrayRef({sizes.batch, sizes.heads}),
              "pse of pse_type 2 and 3 must have the shape [N] or [B, N], which is [", sizes.heads,
              "] or [", sizes.batch, ", ", sizes.heads, "], but got ", shape);
}

void check_sequences_encoding(const Tensor& pse, const AttentionOptions& options,
                              const Geometry& sizes) {
  int64_t pairs = 0, q = 0, kv = 0;
  bool equal = true;
  for (size_t i = 0; i < options.q_ends.size(); ++i) {
    const int64_t s = options.q_ends[i] - q, t = options.kv_ends[i] - kv;
    TORCH_CHECK(s > 0 && t > 0, "pse in layout TND needs sequences that are not empty");
    equal = equal && s == t;
    pairs += s * t;
    q = options.q_ends[i];
    kv = options.kv_ends[i];
  }
  const int64_t n = sizes.heads, t = longest(options.kv_ends);
  const at::IntArrayRef shape = pse.sizes();
  const bool compressed = shape == at::IntArrayRef({sizes.batch, n, kEncodedRows, t}) ||
                          shape == at::IntArrayRef({1, n, kEncodedRows, t});
  const bool flat = pse.dim() == 1 && (shape[0] == n * pairs || shape[0] == n * kv);
  TORCH_CHECK(
      flat || (compressed && equal),
      "pse in layout TND holds [N, S, T] or [N, 1, T] of each sequence, one after the other ",
      "in one dimension (", n * pairs, " or ", n * kv, " elements), or, for queries as long ",
      "as keys, the last 1024 rows [B or 1, N, 1024, ", t, "], but got ", shape);
}

void check_encoding(const Tensor& pse, at::ScalarType dtype, const AttentionOptions& options,
                    const Geometry& sizes) {
  if (!pse.defined()) return;
  if (options.pse_type >= kPseSlopes) return check_slopes(pse, sizes);
  TORCH_CHECK(pse.scalar_type() == dtype, "pse must have the dtype of query, ", dtype, ", but is ",
              pse.scalar_type());
  if (options.layout == Layout::kTND) return check_sequences_encoding(pse, options, sizes);
  const int64_t n = sizes.heads, s = sizes.q_length, t = sizes.kv_length;
  const bool batches = pse.dim() == 4 && (pse.size(0) == sizes.batch || pse.size(0) == 1);
  const bool rows = pse.dim() == 4 && (pse.size(2) == s || pse.size(2) == 1 ||
                                       (pse.size(2) == kEncodedRows && s > kEncodedRows && s == t));
  TORCH_CHECK(batches && rows && pse.size(1) == n && pse.size(3) == t,
              "pse must have the shape [B or 1, N, S or 1, T], where B, N, S, T are ", sizes.batch,
              ", ", n, ", ", s, ", ", t,
              ", or for queries as long as keys [B or 1, N, 1024, T], but got ", pse.sizes());
}

}  // namespace

Geometry check_attention(const AttentionInputs& inputs, const AttentionOptions& options) {
  check_options(options);
  check_tensors(inputs, options.layout);
  Geometry sizes = check_sizes(inputs, options);
  check_sequences(options, sizes);
  check_mask(inputs.mask, options, sizes);
  check_encoding(inputs.pse, inputs.query.scalar_type(), options, sizes);
  return sizes;
}

}  // namespace ascendsim::kernels
