// The ops of ring.h on a GPU. They read state from memory, never from their arguments, so that a
// graph can replay them.
#pragma once
#include "ring/ring.h"

namespace gear::cuda {

using cpu::Ring;
using cpu::RingDraw;
using cpu::ScatterColumn;

void RingAdd(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* lengths,
             int64_t count, int64_t initial, Placed* placed, void* stream);

void RingSelect(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const RingDraw& draw, int64_t count, Resolution* resolutions, float* weights,
                void* stream);

// Words of scratch memory that RingUpdate needs.
int64_t RingUpdateScratch(int64_t count);
void RingUpdate(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const Resolution* resolutions, const float* values, int64_t count, int64_t* scratch,
                void* stream);

void Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count, void* stream);

}  // namespace gear::cuda
