/* The formats in which a weight is stored, and how a line of a weight becomes floats.

   A weight [out, in] is stored in panels of PANEL outputs. A panel consists of blocks, and a block
   of groups of inputs:

       block   the scales and the minimums of its outputs (fp16), and its groups
       group   the factors of these scales and minimums (bytes), and its quanta

   A quantum is an integer of a few bits. Its weight is scale * (quantum - zero), or
   scale * quantum + minimum. Each of these operations is exact or rounds once, as where the formats
   are defined (llama.cpp's ggml). So a weight has the same bits as in a model that was converted to
   float32 as a whole.

   The quanta of a group lie in planes: first the low four bits (or all eight bits) of each quantum,
   then the bits that remain. A byte of a plane of four bits belongs to one output and two inputs;
   a byte of a plane of two bits, to one output and four inputs; a byte of a plane of one bit, to
   eight outputs and one input. */
#pragma once

#include "vector.h"

#define PANEL (2 * LANES) /* the number of outputs that are computed together */

enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

typedef struct {
    int name;
    int bits;    /* of a quantum; 16 or 32: the weights are floats */
    int zero;    /* the quantum of the weight 0 */
    int minimum; /* 1: a minimum is added to each weight */
    int inputs;  /* of a group */
    int groups;  /* of a block. If there are several, each has factors of the scales and minimums */
} Format;

/* EACH_FORMAT(CASE, ...): CASE(name, ...) for each format but F32. */
#define EACH_FORMAT(CASE, ...) \
    CASE(F16, __VA_ARGS__) CASE(BF16, __VA_ARGS__) CASE(Q4_0, __VA_ARGS__) \
    CASE(Q4_1, __VA_ARGS__) CASE(Q5_0, __VA_ARGS__) CASE(Q5_1, __VA_ARGS__) \
    CASE(Q8_0, __VA_ARGS__) CASE(Q4_K, __VA_ARGS__) CASE(Q5_K, __VA_ARGS__) \
    CASE(Q6_K, __VA_ARGS__)

static const Format FORMATS[] = {
    {F32, 32, 0, 0, 32, 1},   {F16, 16, 0, 0, 32, 1},  {BF16, 16, 0, 0, 32, 1},
    {Q4_0, 4, 8, 0, 32, 1},   {Q4_1, 4, 0, 1, 32, 1},  {Q5_0, 5, 16, 0, 32, 1},
    {Q5_1, 5, 0, 1, 32, 1},   {Q8_0, 8, 128, 0, 32, 1}, {Q4_K, 4, 0, 1, 32, 8},
    {Q5_K, 5, 0, 1, 32, 8},   {Q6_K, 6, 32, 0, 16, 16},
};

/* In the functions below, f must be a constant: the compiler then makes a loop for each format. */
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t header_bytes(Format f) { return f.bits < 16 ? 2 * PANEL * (1 + f.minimum) : 0; }

INLINE int64_t factor_bytes(Format f) { return f.groups > 1 ? PANEL * (1 + f.minimum) : 0; }

INLINE int64_t group_bytes(Format f)
{
    return factor_bytes(f) + (int64_t)f.inputs * PANEL * f.bits / 8;
}

INLINE int64_t block_bytes(Format f) { return header_bytes(f) + f.groups * group_bytes(f); }

/* The bytes of a panel of a weight with `in` inputs. Only floats may end within a group. */
INLINE int64_t panel_bytes(Format f, int64_t in)
{
    return f.bits < 16 ? in / (f.inputs * f.groups) * block_bytes(f) : in * PANEL * f.bits / 8;
}

/* A group of a panel: where its quanta are, and the scale and the minimum of each output. */
typedef struct {
    const uint8_t *quanta;
    vec scale[2], minimum[2];
} Group;

/* Group number `index` of a panel. */
INLINE Group group_of(Format f, const uint8_t *panel, int64_t index)
{
    const uint8_t *block = panel + index / f.groups * block_bytes(f);
    const uint8_t *factors = block + header_bytes(f) + index % f.groups * group_bytes(f);
    Group g = {.quanta = factors + factor_bytes(f)};
    for (int half = 0; f.bits < 16 && half < 2; half++) {
        const uint8_t *minimums = block + 2 * PANEL;
        g.scale[half] = load_fp16(block + half * 2 * LANES);
        if (f.minimum)
            g.minimum[half] = load_fp16(minimums + half * 2 * LANES);
        if (f.groups > 1 && f.minimum) { /* Q4_K, Q5_K: the minimum is subtracted */
            g.scale[half] *= floats(load_bytes(factors + half * LANES));
            g.minimum[half] *= -floats(load_bytes(factors + PANEL + half * LANES));
        } else if (f.groups > 1) { /* Q6_K: a factor has a sign; 128 is 0 */
            g.scale[half] *= floats(load_bytes(factors + half * LANES) - 128);
        }
    }
    return g;
}

/* The weights of input i of a group: weights[half], LANES outputs each. */
INLINE void line_of(Format f, const Group *g, int64_t i, vec *weights)
{
    const uint8_t *rest = g->quanta + f.inputs * PANEL / 2; /* after the plane of four bits */
    for (int half = 0; half < 2; half++) {
        int64_t at = half * LANES;
        if (f.name == F32)
            weights[half] = load((const float *)g->quanta + i * PANEL + at);
        else if (f.name == F16)
            weights[half] = load_fp16(g->quanta + 2 * (i * PANEL + at));
        else if (f.name == BF16)
            weights[half] = (vec)(load_shorts(g->quanta + 2 * (i * PANEL + at)) << 16);
        if (f.bits >= 16)
            continue;
        ints quantum;
        if (f.bits == 8)
            quantum = load_bytes(g->quanta + i * PANEL + at);
        else
            quantum = load_bytes(g->quanta + i / 2 * PANEL + at);
        if (f.bits < 8 && i % 2)
            quantum >>= 4;
        else if (f.bits < 8)
            quantum &= 15;
        if (f.bits == 5)
            quantum |= lanes_of(rest + i * PANEL / 8, half) & 16;
        if (f.bits == 6)
            quantum |= (load_bytes(rest + i / 4 * PANEL + at) >> 2 * (i % 4) & 3) << 4;
        if (f.minimum)
            weights[half] = multiply_add(g->scale[half], floats(quantum), g->minimum[half]);
        else
            weights[half] = g->scale[half] * floats(quantum - f.zero);
    }
}
