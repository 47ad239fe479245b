#pragma once

#include "vector.h"

#define PANEL (2 * LANES) /* the number of outputs that are computed together */

/* weight: [panels, in, PANEL], the last panel padded with zeros; bias: [out] or NULL. */
typedef struct {
    const float *weight, *bias;
    int64_t in, out;
} Linear;

/* out [rows, out] = x [rows, in] times the weight, + bias, + add [rows, out] unless add is NULL.
   All threads of a parallel region call this. It returns when all of them are done. */
void linear(const Linear *l, const float *x, const float *add, float *out, int64_t rows);

/* out [rows, width] = silu(gate) * up. The panels of the weight alternate: one of gate, one of up.
   l->out is 2 * width, and width is a multiple of PANEL. All threads of a parallel region call
   this. */
void gated_linear(const Linear *l, const float *x, float *out, int64_t rows);
