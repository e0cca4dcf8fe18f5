// Rows of whole trajectories, one after the other: a pack without padding between them.
#pragma once
#include <cstdint>

#include "gather/gather.h"

namespace gear::cpu {

// Writes the rows [first, first + rows) of a pack. Trajectory i lies at [places[i], places[i] +
// num_steps). A place holds the trajectory's step that is `window.offset` later; where there is
// none, the pad value. Places of no trajectory are not written. Field::out is [rows, elements].
void Pack(const Field* fields, int64_t num_fields, const Resolution* resolutions,
          const int64_t* places, int64_t count, int64_t first, int64_t rows);

}  // namespace gear::cpu
