/* Vectors as wide as a register of this CPU, with the vector extension of GCC and Clang. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4 /* an older x86 CPU, or an ARM CPU */
#endif
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* TILE: the number of rows that are computed at once. Their sums, at most two registers for each
   row, must leave registers free for the operands. EACH(CASE): CASE for each number of rows that a
   tile may have, because the compiler must know this number. */
#if LANES == 16 || defined(__aarch64__)
#define TILE 12 /* with 32 registers */
#define EACH(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define TILE 6 /* with 16 registers */
#define EACH(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *from) { return *(const vec *)from; }

static inline void store(float *to, vec v) { *(vec *)to = v; }

/* a * b + c, rounded only once if the CPU can do that. -ffp-contract=off forbids the compiler to
   fuse products and sums on its own. It might do so in one copy of a loop and not in another, and
   the bits of a row would then depend on the number of rows that are computed with it. */
static inline vec multiply_add(vec a, vec b, vec c)
{
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* A vector with the same number in all lanes. */
static inline vec repeat(float x) { return x - (vec){0}; }

typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec floats(ints x) { return __builtin_convertvector(x, vec); }

/* LANES bytes as integers. GCC 12 would convert them one at a time without the intrinsics. */
static inline ints load_bytes(const uint8_t *from)
{
#if LANES == 16 && defined(__AVX512F__)
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
#elif LANES == 8 && defined(__AVX2__)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
#else
    typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes *)from, ints);
#endif
}

/* LANES integers of 16 bits. */
static inline ints load_shorts(const uint8_t *from)
{
#if LANES == 16 && defined(__AVX512F__)
    return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
#elif LANES == 8 && defined(__AVX2__)
    return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
#else
    typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const shorts *)from, ints);
#endif
}

/* LANES finite numbers of 16 bits (fp16). All of them are exact in float32. */
static inline vec load_fp16(const uint8_t *from)
{
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#else
    ints bits = load_shorts(from);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponents differ by 112 */
    return (vec)((ints)size | (bits & 0x8000) << 16);
#endif
}

/* Half 0 or 1 of a line of 2 * LANES bits: -1 in the lanes of a bit that is set, 0 in the others. */
static inline ints lanes_of(const uint8_t *from, int half)
{
    static const int32_t BITS[] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                   1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    uint32_t line = 0;
    memcpy(&line, from, LANES / 4);
    return (((int32_t)(line >> half * LANES) - (ints){0}) & *(const ints *)BITS) != 0;
}

/* LOW, HIGH: interleave the first or the last two numbers of each four lanes. LOWS and HIGHS: the
   first or the last pairs. */
#if LANES == 16 && defined(__AVX512F__)
#define LOW(x, y) (vec)_mm512_unpacklo_ps((__m512)x, (__m512)y)
#define HIGH(x, y) (vec)_mm512_unpackhi_ps((__m512)x, (__m512)y)
#define LOWS(x, y) (vec)_mm512_unpacklo_pd((__m512d)x, (__m512d)y)
#define HIGHS(x, y) (vec)_mm512_unpackhi_pd((__m512d)x, (__m512d)y)
#elif LANES == 8 && defined(__AVX__)
#define LOW(x, y) (vec)_mm256_unpacklo_ps((__m256)x, (__m256)y)
#define HIGH(x, y) (vec)_mm256_unpackhi_ps((__m256)x, (__m256)y)
#define LOWS(x, y) (vec)_mm256_unpacklo_pd((__m256d)x, (__m256d)y)
#define HIGHS(x, y) (vec)_mm256_unpackhi_pd((__m256d)x, (__m256d)y)
#elif LANES == 4 && defined(__clang__)
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 4, 1, 5)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 6, 3, 7)
#define LOWS(x, y) __builtin_shufflevector(x, y, 0, 1, 4, 5)
#define HIGHS(x, y) __builtin_shufflevector(x, y, 2, 3, 6, 7)
#elif LANES == 4
#define LOW(x, y) __builtin_shuffle(x, y, (ints){0, 4, 1, 5})
#define HIGH(x, y) __builtin_shuffle(x, y, (ints){2, 6, 3, 7})
#define LOWS(x, y) __builtin_shuffle(x, y, (ints){0, 1, 4, 5})
#define HIGHS(x, y) __builtin_shuffle(x, y, (ints){2, 3, 6, 7})
#endif

/* Four numbers of each of the rows 0, 4, 8 ... as one vector. */
static inline vec load_fours(const float *const *row, int64_t d)
{
#if LANES == 16 && defined(__AVX512F__)
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(row[0] + d));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(row[4] + d), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(row[8] + d), 2);
    return (vec)_mm512_insertf32x4(v, _mm_loadu_ps(row[12] + d), 3);
#elif LANES == 8 && defined(__AVX__)
    __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(row[0] + d));
    return (vec)_mm256_insertf128_ps(v, _mm_loadu_ps(row[4] + d), 1);
#else
    return load(row[0] + d);
#endif
}

/* Columns d to d + 4 of LANES rows, as four vectors. */
static inline __attribute__((always_inline)) void turn_four(
    const float *const *row, int64_t d, vec turned[4])
{
#ifdef LOW
    vec a = load_fours(row, d), b = load_fours(row + 1, d);
    vec c = load_fours(row + 2, d), e = load_fours(row + 3, d);
    vec low_ab = LOW(a, b), high_ab = HIGH(a, b), low_ce = LOW(c, e), high_ce = HIGH(c, e);
    turned[0] = LOWS(low_ab, low_ce);
    turned[1] = HIGHS(low_ab, low_ce);
    turned[2] = LOWS(high_ab, high_ce);
    turned[3] = HIGHS(high_ab, high_ce);
#else
    for (int64_t j = 0; j < 4; j++)
        for (int64_t k = 0; k < LANES; k++)
            turned[j][k] = row[k][d + j];
#endif
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The sum of all lanes, always in the same order. */
static inline float sum(vec v)
{
    typedef float four __attribute__((vector_size(16)));
    union {
        vec whole;
        four quarters[LANES / 4];
    } lanes = {v};
    four s = lanes.quarters[0];
    for (int i = 1; i < LANES / 4; i++)
        s += lanes.quarters[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* The dot product of two rows of n numbers. */
static inline float dot(const float *a, const float *b, int64_t n)
{
    vec products = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        products = multiply_add(load(a + i), load(b + i), products);
    for (; i < n; i++)
        rest += a[i] * b[i];
    return sum(products) + rest;
}

/* to += factor * from, for n numbers. */
static inline void add_scaled(float *to, const float *from, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += factor * from[i];
}

/* e^x, exact up to the last bit or two, for x from -87 to 88. Smaller and larger numbers are
   clamped to this range. The compiler can vectorize all operations: the result is 2^n times a
   polynomial of the remainder r. The coefficients are from the Cephes library. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: adding it rounds */
    n -= 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log 2 in two parts, for precision */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union {
        int32_t bits;
        float value;
    } power = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.value;
}
