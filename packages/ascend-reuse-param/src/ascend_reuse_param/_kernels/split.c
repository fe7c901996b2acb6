/* The codec, and AdamW on split parameters, on a CPU. What is computed is defined in _bits.py and
 * _fingerprint.py.
 *
 * A parameter is walked in blocks of 64 rows of 64 elements, and a block is worked on while it is
 * in the first-level cache: each array is read from memory once and written once. Functions called
 * `row_*` work on exactly 64 elements, so that the compiler turns their loops into vectors; a row
 * that is shorter is copied into a full one first.
 *
 * To be compiled with -ffp-contract=off: the step says itself where it fuses a product and a sum.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { SIDE = 64, BLOCK = SIDE * SIDE, LINE = 64 };

/* Elements up to which one thread is faster than waking others; as torch has it. */
enum { GRAIN = 32768 };

/* How far ahead of use memory is asked for, in elements. The processor does so itself, but not
 * beyond a page of 4 KiB, which 2-byte arrays leave every 2048 elements. */
enum { AHEAD = 1024, STEP_AHEAD = 768 };

typedef struct {
    const uint64_t *weighted; /* [64] */
    const uint64_t *plain;    /* [64] */
} Tables;

/* Where the parts of a parameter are; bitmap is NULL where ties are rounded away from zero. */
typedef struct {
    int64_t numel;
    uint16_t *weight;
    uint16_t *residual;
    uint8_t *bitmap;
    uint64_t *fingerprints;
    Tables tables;
    int32_t threads;
} Split;

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Ask for what is ahead of a row of elements of `size` bytes; beyond the end it does nothing. */
#define PREFETCH(row, ahead, size, for_writing) \
    for (int line = 0; line < SIDE * (size) / LINE; line++) \
    __builtin_prefetch((const char *)(row) + (ahead) * (size) + LINE * line, for_writing)

INLINE int is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* Fingerprints */

/* 16 pairs of neighbours. Shifts widen both where they are; what moves lanes would be slower. */
enum { PAIRS = 16 };
typedef int32_t Pairs __attribute__((vector_size(PAIRS * 4)));

/* The sum of sums counts the first row 64 times and the last once: no product is needed. */
static uint64_t fingerprint(const uint16_t *weight, int64_t numel, Tables tables) {
    uint16_t padded[BLOCK];
    if (numel < BLOCK) {
        memset(padded, 0, sizeof padded);
        weight = memcpy(padded, weight, numel * sizeof *weight);
    }
    int32_t sums[SIDE], weighted[SIDE];
    for (int column = 0; column < SIDE; column += 2 * PAIRS) {
        Pairs even = {0}, odd = {0}, of_even = {0}, of_odd = {0};
        for (int row = 0; row < SIDE; row++) {
            Pairs pairs;
            memcpy(&pairs, weight + row * SIDE + column, sizeof pairs);
            even += pairs << 16 >> 16;
            odd += pairs >> 16;
            of_even += even;
            of_odd += odd;
        }
        for (int i = 0; i < PAIRS; i++) {
            sums[column + 2 * i] = even[i];
            sums[column + 2 * i + 1] = odd[i];
            weighted[column + 2 * i] = of_even[i];
            weighted[column + 2 * i + 1] = of_odd[i];
        }
    }
    uint64_t mixed = 0;
    for (int i = 0; i < SIDE; i++)
        mixed += tables.weighted[i] * (uint64_t)(int64_t)weighted[i] +
                 tables.plain[i] * (uint64_t)(int64_t)sums[i];
    return mixed;
}

/* Rows */

/* Exceptions of a row, bit i for element i; most rows have none. */
static uint64_t exceptions_of(const uint32_t *bits) {
    uint64_t word = 0;
    for (int i = 0; i < SIDE; i++) {
        uint64_t tie = (bits[i] & 0x1ffffu) == 0x18000u;
        uint64_t signalling = !(bits[i] & 0x400000u);
        word |= (is_nan(bits[i]) ? signalling : tie) << i;
    }
    return word;
}

INLINE uint64_t row_split(
    const uint32_t *bits, uint16_t *weight, uint16_t *residual, int to_even
) {
    uint32_t any = 0;
    for (int i = 0; i < SIDE; i++) {
        uint32_t u = bits[i], half = to_even ? 0x7fffu + ((u >> 16) & 1u) : 0x8000u;
        uint32_t nan = is_nan(u);
        weight[i] = (uint16_t)(nan ? (u >> 16) | 0x40u : (u + half) >> 16);
        residual[i] = (uint16_t)u;
        any |= nan | ((u & 0x1ffffu) == 0x18000u);
    }
    return to_even && any ? exceptions_of(bits) : 0;
}

INLINE uint32_t join(uint32_t high, uint32_t low, uint32_t exception, int to_even) {
    uint32_t nan = (high & 0x7fffu) > 0x7f80u;
    uint32_t borrow = to_even ? low + exception > 0x8000u : low >= 0x8000u;
    uint32_t top = nan ? high & ~(exception << 6) : high - borrow;
    return top << 16 | low;
}

INLINE void row_join(
    const uint16_t *weight, const uint16_t *residual, uint64_t word, uint32_t *bits, int to_even
) {
    if (!word) {
        for (int i = 0; i < SIDE; i++)
            bits[i] = join(weight[i], residual[i], 0, to_even);
        return;
    }
    for (int i = 0; i < SIDE; i++)
        bits[i] = join(weight[i], residual[i], (uint32_t)(word >> i) & 1u, to_even);
}

INLINE void row_taken(const uint16_t *weight, uint32_t *bits) {
    for (int i = 0; i < SIDE; i++)
        bits[i] = (uint32_t)weight[i] << 16;
}

/* Blocks */

enum { IS_LITTLE = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ };
typedef uint64_t __attribute__((aligned(1), may_alias)) Unaligned;

INLINE uint64_t word_at(const uint8_t *bitmap, int64_t element, int64_t numel) {
    uint64_t word = 0;
    if (numel == SIDE && IS_LITTLE)
        return *(const Unaligned *)(bitmap + element / 8);
    for (int64_t i = 0; i < (numel + 7) / 8; i++)
        word |= (uint64_t)bitmap[element / 8 + i] << 8 * i;
    return word;
}

INLINE void write_word(uint8_t *bitmap, int64_t element, int64_t numel, uint64_t word) {
    if (numel == SIDE && IS_LITTLE)
        *(Unaligned *)(bitmap + element / 8) = word;
    else
        for (int64_t i = 0; i < (numel + 7) / 8; i++)
            bitmap[element / 8 + i] = (uint8_t)(word >> 8 * i);
}

/* Join `numel` elements from `at` on, which are within a block, into `bits`. */
INLINE void block_join(
    const Split *s, int64_t at, int64_t numel, int same, uint32_t *bits, int to_even
) {
    for (int64_t row = 0; row < numel; row += SIDE) {
        int64_t size = smaller(numel - row, SIDE), from = at + row;
        const uint16_t *weight = s->weight + from, *residual = s->residual + from;
        uint64_t word = to_even && same ? word_at(s->bitmap, from, size) : 0;
        if (size == SIDE) {
            if (same)
                row_join(weight, residual, word, bits + row, to_even);
            else
                row_taken(weight, bits + row);
            continue;
        }
        for (int64_t i = 0; i < size; i++)
            bits[row + i] = join(weight[i], same ? residual[i] : 0, word >> i & 1, to_even);
    }
}

/* Split `numel` elements to `at`. */
INLINE void block_split(
    const Split *s, const uint32_t *bits, int64_t at, int64_t numel, int to_even
) {
    for (int64_t row = 0; row < numel; row += SIDE) {
        int64_t size = smaller(numel - row, SIDE), from = at + row;
        uint32_t padded[SIDE] = {0};
        uint16_t short_weight[SIDE], short_residual[SIDE];
        int full = size == SIDE;
        const uint32_t *source = bits + row;
        uint16_t *weight = full ? s->weight + from : short_weight;
        uint16_t *residual = full ? s->residual + from : short_residual;
        if (!full)
            source = memcpy(padded, source, size * sizeof *source);
        uint64_t word = row_split(source, weight, residual, to_even);
        if (to_even)
            write_word(s->bitmap, from, size, word);
        if (!full) {
            memcpy(s->weight + from, weight, size * sizeof *weight);
            memcpy(s->residual + from, residual, size * sizeof *residual);
        }
    }
}

static uint64_t block_fingerprint(const Split *s, int64_t at, int64_t numel) {
    return fingerprint(s->weight + at, numel, s->tables);
}

/* AdamW, in the operations of torch's for-loop and in its order */

/* The function by which torch takes roots where it has MKL, which does not round every one of
 * them correctly. */
typedef void (*Roots)(int32_t, const float *, float *, int64_t);

typedef struct {
    const void *gradient; /* BF16 or FP32 */
    float *exp_avg;
    float *exp_avg_sq;
    float *max_exp_avg_sq; /* NULL without amsgrad */
    Roots roots;           /* NULL for roots that are rounded correctly */
    int64_t roots_mode;
    float gradient_factor; /* 1, or what each gradient is multiplied with first */
    float decay;           /* what each weight is multiplied with */
    float coupled_decay;   /* 0, or how much of the weight is added to the gradient */
    float average;         /* 1 - beta1 */
    float beta2;
    float square;     /* 1 - beta2 */
    float correction; /* the root of 1 - beta2 ^ step */
    float eps;
    float negative_step_size;
    int32_t gradient_is_bf16;
    int32_t maximize;
    int32_t fused; /* a product and a sum are rounded once */
} Step;

/* Elements that are stepped at a time. What is in between would stay in the first-level cache for
 * many more, but the next reads from memory would wait for it. */
enum { STRIP = 128 };

typedef union {
    uint32_t bits[STRIP];
    float values[STRIP];
} __attribute__((aligned(LINE))) Strip;

INLINE float multiply_add(float a, float b, float c, int fused) {
    return fused ? __builtin_fmaf(a, b, c) : a * b + c;
}

/* Where gradients need no more than to be widened, which is done when they are used. */
INLINE int is_plain(const Step *p) {
    return p->gradient_is_bf16 && p->gradient_factor == 1.0f && !p->maximize &&
           p->coupled_decay == 0.0f;
}

INLINE float widened(uint16_t bf16) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)bf16 << 16};
    return wide.value;
}

INLINE void strip_gradients(
    const Step *p, int64_t at, int64_t numel, const Strip *weights, Strip *gradients, int fused
) {
    const uint16_t *narrow = (const uint16_t *)p->gradient + at;
    const float *wide = (const float *)p->gradient + at;
    for (int64_t i = 0; i < numel; i++)
        gradients->values[i] = p->gradient_is_bf16 ? widened(narrow[i]) : wide[i];
    if (p->gradient_factor != 1.0f)
        for (int64_t i = 0; i < numel; i++)
            gradients->values[i] *= p->gradient_factor;
    if (p->maximize)
        for (int64_t i = 0; i < numel; i++)
            gradients->values[i] = -gradients->values[i];
    if (p->coupled_decay != 0.0f)
        for (int64_t i = 0; i < numel; i++)
            gradients->values[i] = multiply_add(
                p->coupled_decay, weights->values[i], gradients->values[i], fused
            );
}

/* Torch's lerp starts from the end that is nearer. */
INLINE void strip_averages(
    const Step *p, int64_t at, int64_t numel, Strip *weights, const Strip *gradients, int fused
) {
    const uint16_t *narrow = (const uint16_t *)p->gradient + at;
    float *restrict m = p->exp_avg + at, *restrict v = p->exp_avg_sq + at;
    int near = fabsf(p->average) < 0.5f;
    float factor = near ? p->average : p->average - 1.0f;
    for (int64_t i = 0; i < numel; i++) {
        float g = gradients ? gradients->values[i] : widened(narrow[i]);
        weights->values[i] *= p->decay;
        m[i] = multiply_add(factor, g - m[i], near ? m[i] : g, fused);
        v[i] = multiply_add(p->square * g, g, v[i] * p->beta2, fused);
    }
}

INLINE const float *strip_largest(const Step *p, int64_t at, int64_t numel) {
    const float *v = p->exp_avg_sq + at;
    if (!p->max_exp_avg_sq)
        return v;
    float *restrict largest = p->max_exp_avg_sq + at;
    for (int64_t i = 0; i < numel; i++) /* a NaN in either stays */
        largest[i] = largest[i] > v[i] || largest[i] != largest[i] ? largest[i] : v[i];
    return largest;
}

/* What numbers are divided by. */
typedef struct {
    float divisor;
    float high, low; /* of its reciprocal */
    int fast;
} Divisor;

INLINE Divisor divisor_of(float divisor, int fused) {
    float high = 1.0f / divisor, low = __builtin_fmaf(-high, divisor, 1.0f) / divisor;
    return (Divisor){divisor, high, low, fused && divisor > 0x1p-20f && divisor < 0x1p20f};
}

/* The correctly rounded quotient of what is neither close to overflow nor to underflow, as roots of
 * FP32 are: Markstein's theorem (IBM J. Res. Dev. 34, 1990), which needs a first quotient that is
 * one of the two neighbours of the exact one, and the correctly rounded reciprocal. A division
 * takes the time of a dozen of these. */
INLINE float quotient(float value, Divisor by) {
    float first = __builtin_fmaf(value, by.high, value * by.low);
    float rest = __builtin_fmaf(-first, by.divisor, value);
    float second = __builtin_fmaf(rest, by.high, first);
    return value < INFINITY ? second : value; /* a NaN stays too */
}

INLINE void strip_step(const Step *p, int64_t at, int64_t numel, Strip *weights, int fused) {
    Divisor correction = divisor_of(p->correction, fused);
    const float *m = p->exp_avg + at, *squares = strip_largest(p, at, numel);
    float roots[STRIP] __attribute__((aligned(LINE)));
    if (p->roots)
        p->roots((int32_t)numel, squares, roots, p->roots_mode);
    else
        for (int64_t i = 0; i < numel; i++)
            roots[i] = sqrtf(squares[i]);
    if (!correction.fast)
        for (int64_t i = 0; i < numel; i++)
            roots[i] /= correction.divisor;
    for (int64_t i = 0; i < numel; i++) {
        float root = correction.fast ? quotient(roots[i], correction) : roots[i];
        weights->values[i] += p->negative_step_size * m[i] / (root + p->eps);
    }
}

INLINE void prefetch_strip(const Split *s, const Step *p, int64_t at) {
    for (int64_t row = at; row < at + STRIP; row += SIDE) {
        PREFETCH(s->weight + row, BLOCK, 2, 1); /* the next block's fingerprint comes first */
        PREFETCH(s->residual + row, AHEAD, 2, 1);
        PREFETCH(p->exp_avg + row, STEP_AHEAD, 4, 1);
        PREFETCH(p->exp_avg_sq + row, STEP_AHEAD, 4, 1);
        if (p->gradient_is_bf16)
            PREFETCH((const uint16_t *)p->gradient + row, AHEAD, 2, 0);
        else
            PREFETCH((const float *)p->gradient + row, STEP_AHEAD, 4, 0);
    }
}

INLINE void strip_adamw(
    const Split *s, const Step *p, int64_t at, int64_t numel, int same, int to_even, int fused
) {
    Strip weights, gradients;
    prefetch_strip(s, p, at);
    block_join(s, at, numel, same, weights.bits, to_even);
    if (is_plain(p)) {
        strip_averages(p, at, numel, &weights, 0, fused);
    } else {
        strip_gradients(p, at, numel, &weights, &gradients, fused);
        strip_averages(p, at, numel, &weights, &gradients, fused);
    }
    strip_step(p, at, numel, &weights, fused);
    block_split(s, weights.bits, at, numel, to_even);
}

INLINE void block_adamw(
    const Split *s, const Step *step, int64_t at, int64_t numel, int to_even, int fused
) {
    const Step own = *step, *p = &own; /* what is stored cannot change a copy: it is read once */
    int same = block_fingerprint(s, at, numel) == s->fingerprints[at / BLOCK];
    int64_t strip = 0;
    for (; strip + STRIP <= numel; strip += STRIP) /* loops of a known length are the faster ones */
        strip_adamw(s, p, at + strip, STRIP, same, to_even, fused);
    if (strip < numel)
        strip_adamw(s, p, at + strip, numel - strip, same, to_even, fused);
    s->fingerprints[at / BLOCK] = block_fingerprint(s, at, numel);
}

/* What Python calls */

#define FOR_BLOCKS(s, at) for (int64_t at = 0; at < (s)->numel; at += BLOCK)

INLINE void split_all(const Split *s, const uint32_t *master, int to_even) {
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->numel > GRAIN)
    FOR_BLOCKS(s, at) {
        int64_t numel = smaller(s->numel - at, BLOCK);
        for (int64_t row = 0; row < numel; row += SIDE) {
            PREFETCH(master + at + row, AHEAD, 4, 0);
            PREFETCH(s->weight + at + row, AHEAD, 2, 1);
            PREFETCH(s->residual + at + row, AHEAD, 2, 1);
            int64_t size = smaller(numel - row, SIDE);
            block_split(s, master + at + row, at + row, size, to_even);
        }
        s->fingerprints[at / BLOCK] = block_fingerprint(s, at, numel);
    }
}

INLINE void join_all(const Split *s, uint32_t *master, int to_even) {
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->numel > GRAIN)
    FOR_BLOCKS(s, at) {
        int64_t numel = smaller(s->numel - at, BLOCK);
        int same = block_fingerprint(s, at, numel) == s->fingerprints[at / BLOCK];
        for (int64_t row = 0; row < numel; row += SIDE) {
            PREFETCH(master + at + row, AHEAD, 4, 1);
            PREFETCH(s->residual + at + row, AHEAD, 2, 0);
            PREFETCH(s->weight + at + row, BLOCK, 2, 0); /* the next fingerprint comes first */
            int64_t size = smaller(numel - row, SIDE);
            block_join(s, at + row, size, same, master + at + row, to_even);
        }
    }
}

INLINE void adamw_all(const Split *s, const Step *p, int to_even, int fused) {
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->numel > GRAIN)
    FOR_BLOCKS(s, at) {
        block_adamw(s, p, at, smaller(s->numel - at, BLOCK), to_even, fused);
    }
}

void ascend_split(const Split *s, const uint32_t *master) {
    if (s->bitmap)
        split_all(s, master, 1);
    else
        split_all(s, master, 0);
}

void ascend_join(const Split *s, uint32_t *master) {
    if (s->bitmap)
        join_all(s, master, 1);
    else
        join_all(s, master, 0);
}

void ascend_adamw(const Split *s, const Step *p) {
    if (s->bitmap && p->fused)
        adamw_all(s, p, 1, 1);
    else if (s->bitmap)
        adamw_all(s, p, 1, 0);
    else
        adamw_all(s, p, 0, p->fused);
}

/* For the tests: what `quotient` gives, where `fast` says that it is used. */
int32_t ascend_quotients(const float *values, float *quotients, int64_t numel, float divisor) {
    Divisor by = divisor_of(divisor, 1);
    for (int64_t i = 0; i < numel; i++)
        quotients[i] = quotient(values[i], by);
    return by.fast;
}
