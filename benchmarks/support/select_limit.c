// The limit of selection: draws, a tree of integer sums and memcpy, timed from inside. No powers, no weights:
// the new masses are given.
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { kFanOutBits = 5, kFanOut = 1 << kFanOutBits, kMaxLevels = 12, kBlock = 64 };

// Level 0 holds the masses; a node is the sum of kFanOut nodes below it; the last level is one group.
typedef struct {
  int levels;
  int64_t offset[kMaxLevels], width[kMaxLevels];
} Shape;

static Shape ShapeOf(int64_t num_items) {
  Shape shape = {0};
  int64_t nodes = num_items, offset = 0, width;
  do {
    width = (nodes + kFanOut - 1) / kFanOut * kFanOut;
    shape.offset[shape.levels] = offset;
    shape.width[shape.levels++] = width;
    offset += width;
    nodes = width / kFanOut;
  } while (width > kFanOut);
  return shape;
}

int64_t TreeWords(int64_t num_items) {
  const Shape shape = ShapeOf(num_items);
  return shape.offset[shape.levels - 1] + kFanOut;
}

// Sums the inner nodes above leaves that are set; everything else is 0.
void BuildTree(uint64_t* sums, int64_t num_items) {
  const Shape shape = ShapeOf(num_items);
  for (int level = 1; level < shape.levels; ++level)
    for (int64_t i = 0; i < shape.width[level - 1]; ++i)
      sums[shape.offset[level] + (i >> kFanOutBits)] += sums[shape.offset[level - 1] + i];
}

static int64_t Now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// SplitMix64 of a counter.
static uint64_t Random(uint64_t counter) {
  uint64_t x = (counter + 1) * UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

// A point in [0, end).
static uint64_t Point(uint64_t counter, uint64_t end) {
  return (uint64_t)(((unsigned __int128)Random(counter) * end) >> 64);
}

// Draws go down the tree side by side, so that their cache misses overlap.
static void Draw(const uint64_t* sums, const Shape* shape, uint64_t first, int64_t count, int64_t* items) {
  const uint64_t* top = sums + shape->offset[shape->levels - 1];
  uint64_t total = 0, rest[kBlock];
  for (int i = 0; i < kFanOut; ++i) total += top[i];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = count - begin < kBlock ? count - begin : kBlock;
    int64_t* item = items + begin;
    for (int64_t i = 0; i < n; ++i) item[i] = 0, rest[i] = Point(first + (uint64_t)(begin + i), total);
    for (int level = shape->levels - 1; level >= 0; --level) {
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t* children = sums + shape->offset[level] + item[i] * kFanOut;
        int child = 0;
        while (child < kFanOut - 1 && rest[i] >= children[child]) rest[i] -= children[child++];
        item[i] = item[i] * kFanOut + child;
        if (level > 0) __builtin_prefetch(sums + shape->offset[level - 1] + item[i] * kFanOut);
      }
    }
  }
}

static void Update(uint64_t* sums, const Shape* shape, const int64_t* items, const uint64_t* masses,
                   int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t node = items[i];
    const uint64_t change = masses[i] - sums[node];
    for (int level = 0; level < shape->levels; ++level, node >>= kFanOutBits)
      sums[shape->offset[level] + node] += change;
  }
}

// Batch b: draws, rows of every column to outs[b % num_sets], and the masses of its items from
// masses[b % num_masses]. Without sums every item is as likely, and nothing is updated.
void SelectBatches(int64_t num_columns, const char* const* columns, const int64_t* row_bytes, int64_t num_sets,
                   char* const* outs, uint64_t* sums, int64_t num_items, int64_t num_masses,
                   const uint64_t* masses, uint64_t first_draw, int64_t num_batches, int64_t batch,
                   int64_t* items, int64_t* cpu_ns, int64_t* wall_ns) {
  const Shape shape = ShapeOf(num_items);
  for (int64_t b = 0; b < num_batches; ++b) {
    char* const* out = outs + b % num_sets * num_columns;
    const uint64_t first = first_draw + (uint64_t)(b * batch);
    const int64_t wall = Now(CLOCK_MONOTONIC), cpu = Now(CLOCK_THREAD_CPUTIME_ID);
    if (sums)
      Draw(sums, &shape, first, batch, items);
    else
      for (int64_t i = 0; i < batch; ++i) items[i] = (int64_t)Point(first + (uint64_t)i, (uint64_t)num_items);
    for (int64_t c = 0; c < num_columns; ++c)
      for (int64_t i = 0; i < batch; ++i)
        memcpy(out[c] + i * row_bytes[c], columns[c] + items[i] * row_bytes[c], (size_t)row_bytes[c]);
    if (sums) Update(sums, &shape, items, masses + b % num_masses * batch, batch);
    cpu_ns[b] = Now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    wall_ns[b] = Now(CLOCK_MONOTONIC) - wall;
  }
}
