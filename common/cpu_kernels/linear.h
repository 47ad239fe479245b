#pragma once

#include "vector.h"

#define PANEL (2 * LANES) /* outputs that are computed together */

/* weight: [panels, in, PANEL], the last panel filled up with zeros; bias: [out] or NULL. */
typedef struct {
    const float *weight, *bias;
    int64_t in, out;
} Linear;

/* out [rows, out] = x [rows, in] times the weight, + bias, + add [rows, out] where there is one.
   Called by all threads of a parallel region; on return all of them are done. */
void linear(const Linear *l, const float *x, const float *add, float *out, int64_t rows);

/* out [rows, width] = silu(gate) * up, of a product whose panels are gate's and up's by turns:
   l->out is 2 * width, and width so many whole panels. */
void gated_linear(const Linear *l, const float *x, float *out, int64_t rows);
