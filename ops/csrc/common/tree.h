// A tree of integer sums. Level 0 holds the masses of the items; a node of level l+1 is the sum of kFanOut nodes of
// level l; the top level has at most kFanOut nodes. Every level is padded with zeros to a multiple of kFanOut.
#pragma once
#include "common/host_device.h"

namespace gear {

inline constexpr int kFanOutBits = 5, kFanOut = 1 << kFanOutBits, kMaxLevels = 12;

struct TreeShape {
  int64_t offset[kMaxLevels];  // of each level, in words
  int64_t width[kMaxLevels];   // of each level, padded
  int levels;
  int64_t words;  // of the whole tree
};

GEAR_HOST_DEVICE TreeShape ShapeOfTree(int64_t num_items) {
  TreeShape shape{};
  int64_t nodes = num_items < 1 ? 1 : num_items;
  do {
    const int64_t width = (nodes + kFanOut - 1) / kFanOut * kFanOut;
    shape.offset[shape.levels] = shape.words;
    shape.width[shape.levels++] = width;
    shape.words += width;
    nodes = width / kFanOut;
  } while (shape.width[shape.levels - 1] > kFanOut);
  return shape;
}

struct Hit {
  int64_t item;
  uint64_t remainder;  // in [0, mass of item)
};

// Where `coordinate` in [0, total) falls. Cost: levels * kFanOut additions at most.
GEAR_HOST_DEVICE Hit Descend(const uint64_t* sums, const TreeShape& shape, uint64_t coordinate) {
  int64_t node = 0;
  for (int level = shape.levels - 1; level >= 0; --level) {
    const uint64_t* children = sums + shape.offset[level] + node * kFanOut;
    int child = 0;
    while (child < kFanOut - 1 && coordinate >= children[child]) coordinate -= children[child++];
    node = node * kFanOut + child;
  }
  return {node, coordinate};
}

}  // namespace gear
