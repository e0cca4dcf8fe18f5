// Rows of mapped files that do not fit into memory: read from the disk before they are copied.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/host_device.h"
#include "gather/gather.h"

namespace gear::cpu {

// Marks the map of a file: gathers request its rows before they copy them, so that the disk reads
// many pages at a time. Without it a gather reads one page per page fault, and waits for each.
// `most_bytes`: that a gather requests and has not copied yet. Returns the entry for
// ReadAheadRemove, -1 where all entries are taken: then its rows are read by page faults. Calls are
// serialised by the caller.
int ReadAheadAdd(const void* begin, size_t num_bytes, int64_t most_bytes);

// Removes an entry, before its memory is unmapped; no gather of its columns is under way.
void ReadAheadRemove(int entry);

// The fields of one gather whose columns lie in marked maps. It only advises the kernel: a request
// that fails, or that lies beyond the end of its file, has no effect, and its rows are read by page
// faults. Cost: without marked maps, one load.
class ReadAhead {
 public:
  // `threads`: of the gather, which share the bytes.
  ReadAhead(const Field* fields, int64_t num_fields, int64_t threads);

  bool IsNeeded() const { return !columns_.empty(); }

  // Samples that are requested together, at least 1.
  int64_t block() const { return block_; }

  // Requests the rows of samples [begin, end), in the order of the files, each page once.
  // `n_steps`: as for Gather; null: fields that follow them are left out.
  void Request(const Resolution* resolutions, const int64_t* n_steps, int64_t begin,
               int64_t end) const;

  // Requests the rows of whole trajectories, as far as the bytes of a block reach.
  void RequestWhole(const Resolution* resolutions, int64_t count) const;

  // Calls gather(first, last) for the samples [begin, end) in blocks; a block is requested before
  // the one in front of it is gathered.
  template <typename GatherBlock>
  void InBlocks(const Resolution* resolutions, const int64_t* n_steps, int64_t begin, int64_t end,
                const GatherBlock& gather) const {
    if (!IsNeeded()) return gather(begin, end);
    Request(resolutions, n_steps, begin, Min(begin + block_, end));
    for (int64_t first = begin; first < end; first += block_) {
      const int64_t last = Min(first + block_, end);
      if (last < end) Request(resolutions, n_steps, last, Min(last + block_, end));
      gather(first, last);
    }
  }

 private:
  struct Column {
    const Field* field;
    uintptr_t begin, end;  // of its map
  };

  // Whole pages: of each range the first byte and the one after the last.
  using Ranges = std::vector<std::pair<uintptr_t, uintptr_t>>;

  // Adds the pages of rows [row, row + count) of a column.
  void Add(const Column& column, int64_t row, int64_t count, Ranges* ranges) const;

  static void Advise(Ranges* ranges);

  std::vector<Column> columns_;
  int64_t block_bytes_ = 0, block_ = 1;
  int64_t most_run_ = 0;  // bytes of a run of rows that are requested
};

}  // namespace gear::cpu
