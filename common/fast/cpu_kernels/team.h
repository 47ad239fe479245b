#pragma once

#include <stdint.h>

/* Compute one piece of a job. args: what the pieces of the job share. */
typedef void Piece(const void *args, int64_t index);

/* Compute the pieces 0 to count - 1 on up to `threads` threads. Returns when all of them are done.
   Pieces that run at the same time must not write to the same place. */
void spread(int threads, int64_t count, Piece *piece, const void *args);
