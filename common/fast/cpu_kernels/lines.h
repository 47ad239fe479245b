/* Packed lines: the key or the value of one token and head, as the elective kv_quant stores it.

   A line is a float32 scale, and then one byte for each number: an integer, or in FP8 a float of
   8 bits (e4m3), with a sign, 4 bits of exponent and 3 bits of fraction.

   In INT4, a line is a scale and the smallest number, both bfloat16, and then a byte for two numbers:
   byte i has the steps of number i, and in its upper half those of number dim / 2 + i. */
#pragma once

#include "vector.h"

#define SCALE_BYTES 4
#define FP8 2 /* the value of `packed` in `Memory`. Integers of 8 bits have 1, and float32 has 0 */
#define INT4 3

#define BIAS (120 << 3)  /* the difference of the exponents of float32 and e4m3, in e4m3's bits */
#define SMALLEST 0x1p-6f /* the smallest e4m3 number with a full fraction */
#define STEPS 0x1p9f     /* below it, e4m3 numbers are multiples of 1 / STEPS */

/* The e4m3 number of a byte, exactly: its bits in their places in a float32, times 2 to the power
   of the difference of the exponents. NaN (0x7f) is left out: its line has a scale that is NaN. */
static inline float from_fp8(uint8_t byte)
{
    const uint32_t bits = (uint32_t)(int32_t)(int8_t)byte << 20 & 0x87f00000;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number * 0x1p120f;
}

/* The byte of the nearest e4m3 number. A half goes to the even one. The size is at most 448. */
static inline uint8_t to_fp8(float number)
{
    uint32_t bits, size;
    memcpy(&bits, &number, sizeof bits);
    size = bits & 0x7fffffff;
    size = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - BIAS; /* 20 bits of the fraction go */
    if (fabsf(number) < SMALLEST)
        size = (uint32_t)(int32_t)rintf(fabsf(number) * STEPS);
    return (uint8_t)(size | (bits >> 24 & 0x80));
}

static inline float from_bfloat16(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The nearest bfloat16 number. A half goes to the even one. */
static inline uint16_t to_bfloat16(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return number != number ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline int64_t line_bytes(int64_t format, int64_t dim)
{
    return SCALE_BYTES + (format == INT4 ? dim / 2 : dim);
}

static inline void unpack_int4(const uint8_t *line, int64_t dim, float *to)
{
    const uint8_t *steps = line + SCALE_BYTES;
    uint16_t halves[2];
    memcpy(halves, line, sizeof halves);
    const float scale = from_bfloat16(halves[0]), low = from_bfloat16(halves[1]);
    for (int64_t i = 0; i < dim / 2; i++) {
        to[i] = low + (float)(steps[i] & 15) * scale;
        to[dim / 2 + i] = low + (float)(steps[i] >> 4) * scale;
    }
}

static inline uint8_t step_of(float number, float low, float divisor)
{
    const float steps = (number - low) / divisor, some = steps > 0 ? steps : 0; /* NaN, too */
    return (uint8_t)rintf(some < 15 ? some : 15);
}

static inline void pack_int4(const float *from, int64_t dim, uint8_t *line)
{
    float lowest = from[0], highest = from[0], unusual = 0;
    for (int64_t i = 0; i < dim; i++) {
        lowest = from[i] < lowest ? from[i] : lowest;
        highest = from[i] > highest ? from[i] : highest;
        unusual += from[i] * 0; /* NaN if the number is not finite */
    }
    uint16_t halves[2];
    halves[1] = to_bfloat16(lowest + unusual);
    const float low = from_bfloat16(halves[1]);
    halves[0] = to_bfloat16((highest - low) / 15);
    const float scale = from_bfloat16(halves[0]), divisor = scale > 0 ? scale : 1;
    memcpy(line, halves, sizeof halves);
    for (int64_t i = 0; i < dim / 2; i++)
        line[SCALE_BYTES + i] = (uint8_t)(step_of(from[i], low, divisor) |
                                          step_of(from[dim / 2 + i], low, divisor) << 4);
}

/* Write the numbers of a packed line as float32. */
static inline void unpack_line(int64_t format, const uint8_t *line, int64_t dim, float *to)
{
    if (format == INT4) {
        unpack_int4(line, dim, to);
        return;
    }
    const uint8_t *numbers = line + SCALE_BYTES;
    float scale;
    memcpy(&scale, line, SCALE_BYTES);
    if (format == FP8)
        for (int64_t i = 0; i < dim; i++)
            to[i] = from_fp8(numbers[i]) * scale;
    else
        for (int64_t i = 0; i < dim; i++)
            to[i] = (float)(int8_t)numbers[i] * scale;
}

/* Write a packed line: the largest size becomes 127, or 448 in FP8. The bits are those of torch. If
   a number is not finite, the scale is NaN, and so is the whole line. */
static inline void pack_line(int64_t format, const float *from, int64_t dim, uint8_t *line)
{
    if (format == INT4) {
        pack_int4(from, dim, line);
        return;
    }
    const float most = format == FP8 ? 448 : 127;
    uint8_t *numbers = line + SCALE_BYTES;
    float largest = 0, unusual = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < dim; i++)
        largest = fabsf(from[i]) > largest ? fabsf(from[i]) : largest;
#pragma omp simd reduction(+ : unusual)
    for (int64_t i = 0; i < dim; i++)
        unusual += from[i] * 0; /* NaN if the number is not finite */
    float scale = largest / most + unusual, divisor = scale > 0 ? scale : 1;
    memcpy(line, &scale, SCALE_BYTES);
    for (int64_t i = 0; i < dim; i++) {
        float number = from[i] / divisor;
        number = number > -most ? number : -most; /* NaN, too: C leaves its conversion open */
        number = number < most ? number : most;
        numbers[i] = format == FP8 ? to_fp8(number) : (uint8_t)(int8_t)rintf(number);
    }
}
