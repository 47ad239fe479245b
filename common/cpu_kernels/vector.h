/* As many floats as a register of this CPU holds, by the vector extension of GCC and Clang. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8 /* a register of AVX2, or two of an older x86 or of an ARM */
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *from) { return *(const vec *)from; }

static inline void store(float *to, vec v) { *(vec *)to = v; }

/* The sum of all lanes, halves first: always in the same order. */
static inline float sum(vec v)
{
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    return v[0];
}

/* The product of two rows of n numbers. */
static inline float dot(const float *a, const float *b, int64_t n)
{
    vec products = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        products += load(a + i) * load(b + i);
    for (; i < n; i++)
        rest += a[i] * b[i];
    return sum(products) + rest;
}

/* to += factor * from, n numbers. */
static inline void add_scaled(float *to, const float *from, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += factor * from[i];
}

/* e^x to the last bit or two, in operations that a compiler turns into vectors: 2^n times a
   polynomial of what is left (the coefficients are those of the Cephes library). */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded */
    n -= 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log 2 in two parts */
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
