// The limit: a loop of memcpy over the rows of a batch, timed from inside, so that no caller's cost is in it.
#include <stdint.h>
#include <string.h>
#include <time.h>

static int64_t Now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// Batch b takes `rows` rows from each first_rows[b][i] of every column, and goes to outs[b % num_sets].
void CopyBatches(int64_t num_columns, const char* const* columns, const int64_t* row_bytes, int64_t num_sets,
                 char* const* outs, int64_t num_batches, int64_t batch, int64_t rows, const int64_t* first_rows,
                 int64_t* cpu_ns, int64_t* wall_ns) {
  for (int64_t b = 0; b < num_batches; ++b) {
    char* const* out = outs + b % num_sets * num_columns;
    const int64_t* first = first_rows + b * batch;
    const int64_t wall = Now(CLOCK_MONOTONIC), cpu = Now(CLOCK_THREAD_CPUTIME_ID);
    for (int64_t c = 0; c < num_columns; ++c) {
      const int64_t bytes = row_bytes[c];
      for (int64_t i = 0; i < batch; ++i)
        memcpy(out[c] + i * rows * bytes, columns[c] + first[i] * bytes, (size_t)(rows * bytes));
    }
    cpu_ns[b] = Now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    wall_ns[b] = Now(CLOCK_MONOTONIC) - wall;
  }
}

// Copies `count` pieces of any size, one after the other.
void CopyPieces(int64_t count, const uint64_t* from, const uint64_t* to, const int64_t* bytes) {
  for (int64_t i = 0; i < count; ++i)
    memcpy((char*)(uintptr_t)to[i], (const char*)(uintptr_t)from[i], (size_t)bytes[i]);
}
