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

/* How far ahead of use memory is asked for, in elements. The processor does so itself, but not
 * beyond a page of 4 KiB, which 2-byte arrays leave every 2048 elements. */
enum { AHEAD = 1024 };

typedef struct {
    const int16_t *steps;    /* [64] */
    const uint64_t *rows;    /* [64] */
    const uint64_t *columns; /* [64] */
} Tables;

/* Where the parts of a parameter are; bitmap is NULL where ties are rounded away from zero. */
typedef struct {
    int64_t numel;
    uint16_t *weight;
    uint16_t *residual;
    uint8_t *bitmap;
    uint64_t *fingerprints;
    int64_t *count;
    Tables tables;
    int32_t threads;
} Split;

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Ask for what is `AHEAD` of a row of elements of `size` bytes; beyond the end it does nothing. */
#define PREFETCH(row, size, for_writing) \
    for (int line = 0; line < SIDE * (size) / LINE; line++) \
    __builtin_prefetch((const char *)(row) + AHEAD * (size) + LINE * line, for_writing)

INLINE int is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* Fingerprints */

INLINE uint64_t row_fingerprint(const uint16_t *weight, Tables tables, int32_t *columns) {
    int32_t sum = 0;
    for (int i = 0; i < SIDE; i++) {
        int16_t value = (int16_t)weight[i];
        sum += (int32_t)value * (int32_t)tables.steps[i];
        columns[i] += value;
    }
    return (uint64_t)(int64_t)sum;
}

INLINE uint64_t columns_fingerprint(const int32_t *columns, Tables tables) {
    uint64_t sum = 0;
    for (int i = 0; i < SIDE; i++)
        sum += tables.columns[i] * (uint64_t)(int64_t)columns[i];
    return sum;
}

static uint64_t fingerprint(const uint16_t *weight, int64_t numel, Tables tables) {
    int32_t columns[SIDE] = {0};
    uint64_t sum = 0;
    for (int64_t at = 0; at < numel; at += SIDE) {
        uint16_t padded[SIDE] = {0};
        const uint16_t *row = weight + at;
        if (numel - at < SIDE)
            row = memcpy(padded, row, (numel - at) * sizeof *row);
        sum += tables.rows[at / SIDE] * row_fingerprint(row, tables, columns);
    }
    return sum + columns_fingerprint(columns, tables);
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

INLINE uint64_t word_at(const uint8_t *bitmap, int64_t element, int64_t numel) {
    uint64_t word = 0;
    for (int64_t i = 0; i < (numel + 7) / 8; i++)
        word |= (uint64_t)bitmap[element / 8 + i] << 8 * i;
    return word;
}

INLINE void write_word(uint8_t *bitmap, int64_t element, int64_t numel, uint64_t word) {
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
        PREFETCH(residual, 2, 0);
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

typedef struct {
    uint64_t fingerprint;
    int64_t count;
    int32_t columns[SIDE];
} Made;

/* Split `numel` elements, which are within a block and begin a row, to `at`. */
INLINE void block_split(
    const Split *s, const uint32_t *bits, int64_t at, int64_t numel, Made *made, int to_even
) {
    for (int64_t row = 0; row < numel; row += SIDE) {
        int64_t size = smaller(numel - row, SIDE), from = at + row;
        uint32_t padded[SIDE] = {0};
        uint16_t short_weight[SIDE], short_residual[SIDE];
        int full = size == SIDE;
        const uint32_t *source = bits + row;
        uint16_t *weight = full ? s->weight + from : short_weight;
        uint16_t *residual = full ? s->residual + from : short_residual;
        PREFETCH(s->weight + from, 2, 1);
        PREFETCH(s->residual + from, 2, 1);
        if (!full)
            source = memcpy(padded, source, size * sizeof *source);
        uint64_t word = row_split(source, weight, residual, to_even);
        uint64_t sum = row_fingerprint(weight, s->tables, made->columns);
        made->fingerprint += s->tables.rows[from % BLOCK / SIDE] * sum;
        made->count += __builtin_popcountll(word);
        if (to_even)
            write_word(s->bitmap, from, size, word);
        if (!full) {
            memcpy(s->weight + from, weight, size * sizeof *weight);
            memcpy(s->residual + from, residual, size * sizeof *residual);
        }
    }
}

INLINE int is_same(const Split *s, int64_t at, int64_t numel) {
    return fingerprint(s->weight + at, numel, s->tables) == s->fingerprints[at / BLOCK];
}

INLINE void finish(const Split *s, int64_t at, const Made *made) {
    s->fingerprints[at / BLOCK] =
        made->fingerprint + columns_fingerprint(made->columns, s->tables);
}

/* What Python calls */

#define FOR_BLOCKS(s, at) for (int64_t at = 0; at < (s)->numel; at += BLOCK)

INLINE void split_all(const Split *s, const uint32_t *master, int to_even) {
    int64_t count = 0;
#pragma omp parallel for schedule(static) num_threads(s->threads) reduction(+ : count)
    FOR_BLOCKS(s, at) {
        Made made = {0};
        block_split(s, master + at, at, smaller(s->numel - at, BLOCK), &made, to_even);
        finish(s, at, &made);
        count += made.count;
    }
    *s->count += count;
}

INLINE void join_all(const Split *s, uint32_t *master, int to_even) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
    FOR_BLOCKS(s, at) {
        int64_t numel = smaller(s->numel - at, BLOCK);
        int same = is_same(s, at, numel);
        for (int64_t row = 0; row < numel; row += SIDE) {
            PREFETCH(master + at + row, 4, 1);
            int64_t size = smaller(numel - row, SIDE);
            block_join(s, at + row, size, same, master + at + row, to_even);
        }
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
