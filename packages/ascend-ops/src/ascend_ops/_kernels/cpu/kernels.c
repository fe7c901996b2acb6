/* The operators on a CPU, each in one pass: what is in between stays in registers, and each array is
 * read from memory once and written once.
 *
 * Numbers are computed in FP32, whatever they are stored in, and rounded where the operators of
 * torch would round. Functions take `dtype` as a constant: the compiler makes one of each for every
 * dtype, and turns the loops over columns into vectors.
 *
 * To be compiled with -ffp-contract=off: a product and a sum are rounded once only where it says
 * `fmaf`. So an element's bits depend on neither its place nor the width of vectors.
 */
#define _DEFAULT_SOURCE /* for madvise and mincore */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))

/* Work of fewer elements is done by one thread, which is faster than waking others; as torch. */
enum { GRAIN = 32768 };

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Elements */

enum { FP32, BF16, FP16 }; /* as _library.py numbers them */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of a BF16 number above those that were rounded away. Where `value` is NaN they are those
 * of one if no FP32 number from memory took part, whose last bits might carry: see `plain_nan`. */
INLINE uint32_t to_bf16(float value) {
    uint32_t u = bits_of(value);
    return u + 0x7fffu + (u >> 16 & 1u);
}

INLINE float plain_nan(float value) { return value != value ? NAN : value; }

/* What FP16 calls subnormal is m * 2^-24: with the bits of m below 2^-14, a number between 2^-14 and
 * 2^-13 from which 2^-14 is taken again, exactly. */
INLINE float from_fp16(uint16_t half) {
    uint32_t size = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t normal = size + (size < 31u << 23 ? 112u << 23 : 224u << 23);
    uint32_t small = bits_of(float_of(size + (113u << 23)) - 0x1p-14f);
    return float_of((size < 1u << 23 ? small : normal) | sign);
}

/* The FP32 number that FP16 would make of `value`. Adding 1/2 to what is subnormal there rounds it
 * to a multiple of 2^-24. */
INLINE float as_fp16(float value) {
    uint32_t u = bits_of(value), size = u & 0x7fffffffu;
    uint32_t normal = (size + 0xfffu + (size >> 13 & 1u)) & ~0x1fffu;
    uint32_t small = bits_of(float_of(size) + 0.5f - 0.5f);
    uint32_t finite = size < 113u << 23 ? small : normal;
    uint32_t infinite = size > 255u << 23 ? 0x7fc00000u : 255u << 23;
    return float_of((finite < 143u << 23 ? finite : infinite) | (u & 0x80000000u));
}

/* The bits of what `as_fp16` returned. */
INLINE uint16_t fp16_bits(float value) {
    uint32_t u = bits_of(value), size = u & 0x7fffffffu;
    uint32_t normal = (size - (size < 143u << 23 ? 112u << 23 : 224u << 23)) >> 13;
    uint32_t small = bits_of(float_of(size) + 0.5f);
    return (uint16_t)((size < 113u << 23 ? small : normal) | (u >> 16 & 0x8000u));
}

INLINE float element(const void *restrict from, int64_t i, int dtype) {
    if (dtype == FP32)
        return ((const float *)from)[i];
    uint16_t half = ((const uint16_t *)from)[i];
    return dtype == BF16 ? float_of((uint32_t)half << 16) : from_fp16(half);
}

INLINE void set_element(void *restrict to, int64_t i, float value, int dtype) {
    if (dtype == FP32)
        ((float *)to)[i] = value;
    else
        ((uint16_t *)to)[i] = dtype == BF16 ? (uint16_t)(to_bf16(value) >> 16) : fp16_bits(as_fp16(value));
}

/* A number as it would be read again. */
INLINE float rounded(float value, int dtype) {
    if (dtype == FP32)
        return value;
    return dtype == BF16 ? float_of(to_bf16(value) & 0xffff0000u) : as_fp16(value);
}

INLINE int64_t size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

/* Where an element of a row is, in an array whose rows are `stride` elements apart. */
INLINE void *place(const void *array, int64_t row, int64_t stride, int64_t column, int dtype) {
    return (char *)array + (row * stride + column) * size_of(dtype);
}

/* Run `call`, in which DTYPE is a constant. */
#define WITH_DTYPE(dtype, call) \
    do { \
        if ((dtype) == FP32) { \
            enum { DTYPE = FP32 }; \
            call; \
        } else if ((dtype) == BF16) { \
            enum { DTYPE = BF16 }; \
            call; \
        } else { \
            enum { DTYPE = FP16 }; \
            call; \
        } \
    } while (0)

/* Elements that a thread computes at a time. */
enum { SPAN = 4096 };

/* A system gives fresh memory page by page, as each is first written to, which takes longer than to
 * compute what is written. Asked for the pages of many elements just before these are written, it
 * takes less, and leaves the zeros in a cache. Huge pages would take less still; but where a virtual
 * machine lends free ones to others, to get them back takes longer than all. */
enum { AHEAD = 1 << 18 };

INLINE void ask_for_pages(void *from, int64_t size) {
#ifdef MADV_POPULATE_WRITE /* a Linux that does not know it refuses, and nothing is lost */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)from & -page;
    uintptr_t end = (uintptr_t)from + (uintptr_t)size, last = (end - 1) & -page;
    unsigned char is_there; /* if so the memory was used before, and to look up each page costs */
    if (mincore((void *)last, 1, &is_there) == 0 && !(is_there & 1))
        madvise((void *)first, end - first, MADV_POPULATE_WRITE);
#endif
}

/* SwiGLU */

/* Rows are `*_stride` elements apart, and the elements of a row are beside one another. */
typedef struct {
    int64_t rows, columns; /* of a half */
    const void *gate, *up;
    const void *grad;                 /* of the result; NULL forward */
    void *first, *second;             /* the result, and nothing; or the gradients of gate and up */
    const float *gate_bias, *up_bias; /* [columns], or NULL */
    int64_t gate_stride, up_stride, grad_stride, out_stride;
    float limit; /* infinite where there is none */
    int32_t dtype, threads;
} Swiglu;

/* 1 + exp(-x), with torch's bits in FP32: its vectors take exp from Sleef (https://sleef.org), whose
 * `expf` of 1 ulp this is: the argument is reduced by a multiple q of ln 2, which is subtracted in
 * two parts, and a polynomial takes the rest. What is below 2^-24 differs, which 1 hides.
 *
 * Limits are set to bits, as the order of floats is that of their bits: to choose by comparing
 * floats would take a processor longer, and lead GCC to worse code still. */
INLINE float one_plus_exp_of_minus(float x) {
    uint32_t bits = bits_of(-x);
    bits = (int32_t)bits < (int32_t)bits_of(100.0f) ? bits : bits_of(100.0f);
    float t = float_of(bits < bits_of(-80.0f) ? bits : bits_of(-80.0f)); /* NaN is one of the two */
    float shifted = t * 1.442695040888963407359924681f + 0x1.8p23f; /* q in the last bits */
    float q = shifted - 0x1.8p23f;
    float s = fmaf(q, -0.693145751953125f, t);
    s = fmaf(q, -1.428606765330187045e-06f, s);
    float p = 0.000198527617612853646278381f;
    p = fmaf(p, s, 0.00139304355252534151077271f);
    p = fmaf(p, s, 0.00833336077630519866943359f);
    p = fmaf(p, s, 0.0416664853692054748535156f);
    p = fmaf(p, s, 0.166666671633720397949219f);
    p = fmaf(p, s, 0.5f);
    p = fmaf(s * s, p, s) + 1.0f;
    /* q is added to the exponent; what gets to be infinity or beyond is infinity */
    uint32_t exp = bits_of(p) + (bits_of(shifted) << 23);
    return 1.0f + float_of(exp < bits_of(INFINITY) ? exp : bits_of(INFINITY));
}

/* torch's clamp: NaN stays. What is at the limit lets a gradient pass, and NaN does not. */
INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }

INLINE float within(float x, float limit) { return x < -limit ? -limit : at_most(x, limit); }

/* Some columns of a row, from the pointers on. */
typedef struct {
    const void *gate, *up, *grad;
    void *first, *second;
    const float *gate_bias, *up_bias;
    int64_t columns;
    float limit;
} Span;

INLINE float biased(const void *from, int64_t i, const float *bias, int dtype) {
    float x = element(from, i, dtype);
    return bias ? rounded(plain_nan(x + bias[i]), dtype) : x;
}

/* `plain`: there is neither bias nor limit. */
INLINE void swiglu_forward(Span s, int dtype, int plain) {
#pragma omp simd
    for (int64_t i = 0; i < s.columns; i++) {
        float a = biased(s.gate, i, plain ? 0 : s.gate_bias, dtype);
        float b = biased(s.up, i, plain ? 0 : s.up_bias, dtype);
        a = plain ? a : at_most(a, s.limit);
        b = plain ? b : within(b, s.limit);
        float silu = rounded(a / one_plus_exp_of_minus(a), dtype);
        set_element(s.first, i, silu * b, dtype);
    }
}

INLINE void swiglu_backward(Span s, int dtype, int plain) {
#pragma omp simd
    for (int64_t i = 0; i < s.columns; i++) {
        float whole_a = biased(s.gate, i, plain ? 0 : s.gate_bias, dtype);
        float whole_b = biased(s.up, i, plain ? 0 : s.up_bias, dtype);
        float a = plain ? whole_a : at_most(whole_a, s.limit);
        float b = plain ? whole_b : within(whole_b, s.limit);
        float grad = element(s.grad, i, dtype), denominator = one_plus_exp_of_minus(a);
        float silu = rounded(a / denominator, dtype), sigmoid = 1.0f / denominator;
        float of_silu = rounded(grad * b, dtype), of_up = silu * grad;
        /* torch's compiler fuses this product and sum, but none of the others */
        float of_gate = of_silu * sigmoid * fmaf(a, 1.0f - sigmoid, 1.0f);
        int limited = !plain && s.limit < INFINITY;
        of_gate = limited && !(whole_a <= s.limit) ? 0.0f : of_gate;
        of_up = limited && !(fabsf(whole_b) <= s.limit) ? 0.0f : of_up;
        set_element(s.first, i, of_gate, dtype);
        set_element(s.second, i, of_up, dtype);
    }
}

INLINE void swiglu_span(const Swiglu *s, int64_t row, int64_t from, int dtype, int plain) {
    Span span = {.columns = smaller(s->columns - from, SPAN), .limit = s->limit};
    span.gate = place(s->gate, row, s->gate_stride, from, dtype);
    span.up = place(s->up, row, s->up_stride, from, dtype);
    span.first = place(s->first, row, s->out_stride, from, dtype);
    if (!plain && s->gate_bias) {
        span.gate_bias = s->gate_bias + from;
        span.up_bias = s->up_bias + from;
    }
    if (!s->grad) {
        swiglu_forward(span, dtype, plain);
        return;
    }
    span.grad = place(s->grad, row, s->grad_stride, from, dtype);
    span.second = place(s->second, row, s->out_stride, from, dtype);
    swiglu_backward(span, dtype, plain);
}

/* The pages of some rows, or of AHEAD elements of a longer one. Where rows of `first` lie between
 * those of `second` these are among them. */
INLINE void swiglu_pages(const Swiglu *s, int64_t row, int64_t column, int64_t rows) {
    int64_t stride = s->out_stride, from = row * stride + column;
    int64_t to = column + AHEAD < s->columns ? from + AHEAD : smaller(row + rows, s->rows) * stride;
    int64_t size = (to - from) * size_of(s->dtype);
    ask_for_pages(place(s->first, 0, 0, from, s->dtype), size);
    if (s->second && stride == s->columns)
        ask_for_pages(place(s->second, 0, 0, from, s->dtype), size);
}

void ascend_swiglu(const Swiglu *s) {
    int64_t per_row = (s->columns + SPAN - 1) / SPAN, spans = s->rows * per_row;
    int64_t together = 1; /* rows: a power of 2, as to divide would take as long as a short row */
    while (2 * together * s->columns <= AHEAD)
        together *= 2;
    int plain = !s->gate_bias && s->limit == INFINITY, many = s->rows * s->columns > GRAIN;
#pragma omp parallel for schedule(static) num_threads(s->threads) if (many)
    for (int64_t span = 0; span < spans; span++) {
        int64_t row = span / per_row, from = span % per_row * SPAN;
        if (many && from % AHEAD == 0 && (row & (together - 1)) == 0)
            swiglu_pages(s, row, from, together);
        if (plain)
            WITH_DTYPE(s->dtype, swiglu_span(s, row, from, DTYPE, 1));
        else
            WITH_DTYPE(s->dtype, swiglu_span(s, row, from, DTYPE, 0));
    }
}

/* RMSNorm */

typedef struct {
    int64_t rows, columns;
    const void *x;
    const void *grad;   /* of the result; NULL forward */
    void *out;          /* the result, or the gradient of x */
    const float *scale; /* [columns]: what each column is multiplied with */
    float *scale_grads; /* [chunks, 2, columns]: the first will be that of scale; or NULL */
    int64_t chunks;     /* of rows, whose gradients of scale are summed apart */
    int64_t x_stride, grad_stride;
    float eps;
    int32_t dtype, threads;
} RmsNorm;

/* A row is summed in FP32, in blocks: in each, 64 partial sums of every 64th element, which are then
 * added in pairs. The sums of blocks are added in FP64. Neither vectors nor threads change that. */
enum { LANES = 64, BLOCK = LANES * 64 };

typedef struct {
    double squares;  /* of x */
    double products; /* of x and the gradient of what is normalised */
} Sums;

INLINE float sum_of(float *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE Sums block_sums(
    const void *x, const void *grad, const float *scale, int64_t from, int64_t to, int dtype
) {
    float squares[LANES] = {0}, products[LANES] = {0};
    for (int64_t at = from; at < to; at += LANES) {
        int64_t lanes = smaller(to - at, LANES);
#pragma omp simd
        for (int64_t i = 0; i < lanes; i++) {
            float value = element(x, at + i, dtype);
            squares[i] += value * value;
            if (grad)
                products[i] += element(grad, at + i, dtype) * scale[at + i] * value;
        }
    }
    return (Sums){sum_of(squares), grad ? sum_of(products) : 0.0};
}

INLINE Sums row_sums(
    const void *x, const void *grad, const float *scale, int64_t columns, int dtype
) {
    Sums sums = {0};
    for (int64_t from = 0; from < columns; from += BLOCK) {
        int64_t to = smaller(from + BLOCK, columns);
        Sums block = block_sums(x, grad, scale, from, to, dtype);
        sums.squares += block.squares;
        sums.products += block.products;
    }
    return sums;
}

/* The sum of products where rstd is 0, as squares overflow: 0, but NaN where x is infinite itself. */
INLINE double sum_beyond(
    const void *x, const void *grad, const float *scale, int64_t columns, int dtype
) {
    double sum = 0.0;
    for (int64_t i = 0; i < columns; i++)
        sum += element(grad, i, dtype) * scale[i] * (element(x, i, dtype) * 0.0f);
    return sum;
}

INLINE float rstd_of(Sums sums, const RmsNorm *s) {
    return 1.0f / sqrtf((float)(sums.squares / (double)s->columns) + s->eps);
}

INLINE void rms_norm_forward(const RmsNorm *s, int64_t row, int dtype) {
    const void *x = place(s->x, row, s->x_stride, 0, dtype);
    void *y = place(s->out, row, s->columns, 0, dtype);
    const float *scale = s->scale;
    float rstd = rstd_of(row_sums(x, 0, 0, s->columns, dtype), s);
#pragma omp simd
    for (int64_t i = 0; i < s->columns; i++)
        set_element(y, i, plain_nan(element(x, i, dtype) * rstd * scale[i]), dtype);
}

/* `scale_grad` is added to; NULL where it is not wanted. */
INLINE void rms_norm_backward(const RmsNorm *s, int64_t row, float *scale_grad, int dtype) {
    const void *x = place(s->x, row, s->x_stride, 0, dtype);
    const void *grad = place(s->grad, row, s->grad_stride, 0, dtype);
    void *x_grad = place(s->out, row, s->columns, 0, dtype);
    const float *scale = s->scale;
    int64_t columns = s->columns;
    Sums sums = row_sums(x, grad, scale, columns, dtype);
    float rstd = rstd_of(sums, s);
    if (rstd == 0.0f)
        sums.products = sum_beyond(x, grad, scale, columns, dtype);
    /* the mean of normalised x times its gradient */
    float along = (float)(sums.products / (double)columns) * rstd;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        float normed = element(x, i, dtype) * rstd, g = element(grad, i, dtype);
        set_element(x_grad, i, plain_nan((g * scale[i] - normed * along) * rstd), dtype);
        if (scale_grad)
            scale_grad[i] += g * normed;
    }
}

INLINE void add_to(float *restrict sums, const float *restrict terms, int64_t columns) {
    for (int64_t i = 0; i < columns; i++)
        sums[i] += terms[i];
}

/* Rows whose gradients of scale are summed before the sum is added to others: all in one sum would
 * lose the last bits where there are many. */
enum { ROWS = 64 };

INLINE void rms_norm_chunk(const RmsNorm *s, int64_t chunk, int dtype) {
    int64_t first = chunk * s->rows / s->chunks, end = (chunk + 1) * s->rows / s->chunks;
    int64_t columns = s->columns, size = columns * (int64_t)sizeof(float);
    if (!s->scale_grads) {
        for (int64_t row = first; row < end; row++) {
            if (s->grad)
                rms_norm_backward(s, row, 0, dtype);
            else
                rms_norm_forward(s, row, dtype);
        }
        return;
    }
    float *sums = s->scale_grads + chunk * 2 * columns, *of_rows = sums + columns;
    memset(sums, 0, size);
    for (int64_t block = first; block < end; block += ROWS) {
        memset(of_rows, 0, size);
        for (int64_t row = block; row < smaller(block + ROWS, end); row++)
            rms_norm_backward(s, row, of_rows, dtype);
        add_to(sums, of_rows, columns);
    }
}

void ascend_rms_norm(const RmsNorm *s) {
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->rows * s->columns > GRAIN)
    for (int64_t chunk = 0; chunk < s->chunks; chunk++)
        WITH_DTYPE(s->dtype, rms_norm_chunk(s, chunk, DTYPE));
    for (int64_t chunk = 1; s->scale_grads && chunk < s->chunks; chunk++)
        add_to(s->scale_grads, s->scale_grads + chunk * 2 * s->columns, s->columns);
}

/* Rotary embedding */

enum { DIMENSIONS = 8 };

/* Rows are counted by `dimensions` sizes, the last of which runs fastest; the result is contiguous.
 * Strides are in elements, from row to row; where angles are broadcast they are 0. */
typedef struct {
    int64_t dimensions;
    int64_t sizes[DIMENSIONS], x_strides[DIMENSIONS], angle_strides[DIMENSIONS];
    int64_t columns, pairs;
    const void *x;
    const float *cos, *sin;
    void *y;
    float sign; /* of the angles: 1 or -1 */
    int32_t interleaved, dtype, threads;
} Rotary;

/* Which row it is, and where its elements and angles are. */
typedef struct {
    int64_t index[DIMENSIONS], x, angle;
} Place;

INLINE Place place_of(const Rotary *s, int64_t row) {
    Place at = {.x = 0};
    for (int64_t d = s->dimensions - 1; d >= 0; d--) {
        at.index[d] = row % s->sizes[d];
        at.x += at.index[d] * s->x_strides[d];
        at.angle += at.index[d] * s->angle_strides[d];
        row /= s->sizes[d];
    }
    return at;
}

/* Counting on is faster than dividing for each row. */
INLINE void to_next(const Rotary *s, Place *at) {
    for (int64_t d = s->dimensions - 1; d >= 0; d--) {
        at->x += s->x_strides[d];
        at->angle += s->angle_strides[d];
        if (++at->index[d] < s->sizes[d])
            return;
        at->index[d] = 0;
        at->x -= s->sizes[d] * s->x_strides[d];
        at->angle -= s->sizes[d] * s->angle_strides[d];
    }
}

/* Products and sums are rounded one by one, as torch's operators do in FP32. Both of a pair are read
 * before one is written. */
INLINE void rotary_row(
    const Rotary *s, const void *x, const float *cos, const float *sin, void *y, int dtype,
    int interleaved
) {
    int64_t pairs = s->pairs, step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs;
    float sign = s->sign;
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        float a = element(x, i * step, dtype), b = element(x, i * step + other, dtype);
        float c = cos[i], d = sign * sin[i];
        set_element(y, i * step, plain_nan(a * c - b * d), dtype);
        set_element(y, i * step + other, plain_nan(b * c + a * d), dtype);
    }
}

INLINE void rotary_rows(const Rotary *s, int64_t first, int64_t end, int dtype, int interleaved) {
    Place at = place_of(s, first);
    int64_t rest = (s->columns - 2 * s->pairs) * size_of(dtype);
    for (int64_t row = first; row < end; row++, to_next(s, &at)) {
        const void *x = place(s->x, 0, 0, at.x, dtype);
        void *y = place(s->y, row, s->columns, 0, dtype);
        rotary_row(s, x, s->cos + at.angle, s->sin + at.angle, y, dtype, interleaved);
        if (rest)
            memcpy(place(y, 0, 0, 2 * s->pairs, dtype), place(x, 0, 0, 2 * s->pairs, dtype), rest);
    }
}

void ascend_rotary(const Rotary *s) {
    int64_t rows = 1, at_once = 1 + BLOCK / s->columns;
    for (int64_t d = 0; d < s->dimensions; d++)
        rows *= s->sizes[d];
#pragma omp parallel for schedule(static) num_threads(s->threads) if (rows * s->columns > GRAIN)
    for (int64_t first = 0; first < rows; first += at_once) {
        int64_t end = smaller(first + at_once, rows);
        if (s->interleaved)
            WITH_DTYPE(s->dtype, rotary_rows(s, first, end, DTYPE, 1));
        else
            WITH_DTYPE(s->dtype, rotary_rows(s, first, end, DTYPE, 0));
    }
}
