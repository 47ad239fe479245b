#pragma once

#include "format.h"

#define PARTS 3 /* the most weights that one product has */

/* A weight [out, in]: [panels, panel_bytes], the last panel padded with zeros. */
typedef struct {
    const uint8_t *data;
    int64_t out, format;
} Weight;

/* One product of an input with several weights, such as those of q, k and v. Each weight keeps its
   own format. bias: [out] or NULL; in, out: of all weights together. */
typedef struct {
    const float *bias;
    int64_t in, out, count;
    Weight weights[PARTS];
} Linear;

/* out [rows, out] = x [rows, in] times the weights, + bias, + add [rows, out] unless add is NULL. */
void linear(
    const Linear *l, const float *x, const float *add, float *out, int64_t rows, int threads);

/* out [rows, width] = silu(gate) * up. The product has two weights, of gate and of up, both of
   `width` outputs. */
void gated_linear(const Linear *l, const float *x, float *out, int64_t rows, int threads);
