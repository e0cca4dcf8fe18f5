// The ops on draws and reports of priorities that travel between nodes.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "bindings/checks.h"
#include "bindings/ops.h"
#include "draws/draws.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "rows/rows.h"
#include "select/select.h"

namespace gear {
namespace {

constexpr int64_t kSampleWords = sizeof(cpu::RowSample) / sizeof(int64_t);
constexpr int64_t kReportWords = sizeof(Report) / sizeof(int64_t);
constexpr int64_t kEncodedReportWords = sizeof(cpu::EncodedReport) / sizeof(int64_t);
constexpr int64_t kPackedWords = 4;  // of a resolution, and one more with steps

int64_t* Words(at::Tensor& tensor) { return tensor.mutable_data_ptr<int64_t>(); }

void CheckLong(const at::Tensor& tensor, const char* name, int64_t least) {
  CheckTensor(tensor, name, at::kLong);
  TORCH_CHECK(tensor.numel() >= least, "gear: ", name, " must have ", least, " values, got ",
              tensor.numel());
}

// Values of [0, end), each one an index.
void CheckBelow(const at::Tensor& tensor, const char* name, int64_t count, int64_t end) {
  CheckLong(tensor, name, count);
  const int64_t* values = tensor.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(values, values + count, [&](int64_t v) { return v >= 0 && v < end; }),
              "gear: ", name, " must lie in [0, ", end, ")");
}

cpu::DrawRoutes RoutesOf(const at::Tensor& need_of, const std::optional<at::Tensor>& steps,
                         int64_t count, int64_t words, int64_t offset, int64_t index,
                         int64_t takes_own) {
  CheckTensor(need_of, "need_of", at::kShort);
  TORCH_CHECK(
      need_of.dim() == 2 && need_of.size(1) > 0 && index >= 0 && index < need_of.size(0) &&
          offset >= 0 && (words == kPackedWords || words == kPackedWords + 1),
      "gear: need_of must be [nodes, replicas], the node one of them, the offset at least 0");
  if (steps) CheckLong(*steps, "steps", count);
  return {nullptr,
          need_of.size(1),
          0,
          need_of.const_data_ptr<int16_t>(),
          need_of.size(0),
          index,
          offset,
          takes_own != 0,
          steps ? steps->const_data_ptr<int64_t>() : nullptr,
          words};
}

}  // namespace

void AssignDraws(at::Tensor& owner, at::Tensor& own, at::Tensor& points, at::Tensor& found,
                 const at::Tensor& coordinates, const at::Tensor& totals, int64_t index) {
  const int64_t count = coordinates.numel(), num_shards = totals.numel();
  CheckLong(totals, "totals", 1);
  CheckLong(owner, "owner", count);
  CheckLong(own, "own", count);
  CheckLong(points, "points", count);
  CheckLong(found, "found", 1);
  const int64_t* total = totals.const_data_ptr<int64_t>();
  int64_t sum = 0;
  for (int64_t s = 0; s < num_shards; ++s) {
    TORCH_CHECK(total[s] >= 0 && total[s] <= std::numeric_limits<int64_t>::max() - sum,
                "gear: totals must be at least 0, with a sum below 2^63");
    sum += total[s];
  }
  CheckBelow(coordinates, "coordinates", count, sum);
  Words(found)[0] = cpu::AssignDraws(coordinates.const_data_ptr<int64_t>(), count, total,
                                     num_shards, index, Words(owner), Words(own), Words(points));
}

void EncodeDraws(at::Tensor& samples, at::Tensor& encoded, at::Tensor& ends,
                 const at::Tensor& records, const at::Tensor& own,
                 const std::optional<at::Tensor>& steps, const std::optional<at::Tensor>& goals,
                 const at::Tensor& readers, const at::Tensor& need_of, int64_t offset,
                 int64_t index, int64_t takes_own) {
  const Resolution* resolutions = Resolutions(records);
  const int64_t count = records.size(0);
  CheckTensor(encoded, "encoded", at::kLong);
  TORCH_CHECK(encoded.dim() == 2, "gear: encoded must be [n, words]");
  cpu::DrawRoutes routes =
      RoutesOf(need_of, steps, count, encoded.size(1), offset, index, takes_own);
  CheckLong(readers, "readers", 0);
  TORCH_CHECK(readers.dim() == 2 && readers.size(0) == routes.num_replicas,
              "gear: readers must be [replicas, most], got ", readers.sizes());
  routes.readers = readers.const_data_ptr<int64_t>();
  routes.most = readers.size(1);
  TORCH_CHECK(std::all_of(routes.readers, routes.readers + readers.numel(),
                          [&](int64_t node) { return node < routes.num_nodes; }),
              "gear: readers must be nodes");
  CheckBelow(own, "own", count, std::numeric_limits<int64_t>::max() - offset);
  CheckRecords(samples, "samples", kSampleWords);
  CheckLong(ends, "ends", routes.num_nodes);
  TORCH_CHECK(samples.size(0) >= count * routes.most && encoded.size(0) >= count * routes.most,
              "gear: samples and encoded must hold what each node may need");
  if (goals) CheckLong(*goals, "goals", count);
  cpu::EncodeDraws(resolutions, own.const_data_ptr<int64_t>(),
                   goals ? goals->const_data_ptr<int64_t>() : nullptr, count, routes,
                   reinterpret_cast<cpu::RowSample*>(Words(samples)), Words(encoded), Words(ends));
}

void DecodeDraws(at::Tensor& ring, at::Tensor& origins, at::Tensor& samples, at::Tensor& which,
                 at::Tensor& found, at::TensorList received, const at::Tensor& records,
                 const at::Tensor& own, const std::optional<at::Tensor>& steps,
                 const at::Tensor& owner, const at::Tensor& asked, const at::Tensor& need_of,
                 int64_t first, int64_t offset, int64_t index, int64_t takes_own) {
  const Resolution* resolutions = Resolutions(records);
  const int64_t count = records.size(0), others = asked.numel(), size = ring.size(0);
  const int64_t words = kPackedWords + (steps ? 1 : 0);
  const cpu::DrawRoutes routes = RoutesOf(need_of, steps, count, words, offset, index, takes_own);
  CheckRecords(ring, "ring", kResolutionWords);
  CheckLong(origins, "origins", size);
  CheckRecords(samples, "samples", kSampleWords);
  CheckLong(which, "which", count + others);
  CheckLong(found, "found", 1);
  TORCH_CHECK(samples.size(0) >= count + others, "gear: samples must hold all that is taken");
  CheckBelow(own, "own", count, size);
  CheckBelow(asked, "asked", others, size);
  CheckBelow(owner, "owner", others, routes.num_nodes);
  TORCH_CHECK(static_cast<int64_t>(received.size()) == routes.num_nodes,
              "gear: received must have the words of each node");
  std::vector<int64_t> wanted(routes.num_nodes, 0);
  for (int64_t i = 0; i < others; ++i) ++wanted[owner.const_data_ptr<int64_t>()[i]];
  std::vector<const int64_t*> received_words(routes.num_nodes);
  for (int64_t node = 0; node < routes.num_nodes; ++node) {
    CheckLong(received[node], "received", node == index ? 0 : words * wanted[node]);
    received_words[node] = received[node].const_data_ptr<int64_t>();
  }
  auto* out = reinterpret_cast<Resolution*>(Words(ring));
  constexpr int64_t kUnknown = -1;  // id of a sample of which this node has no row
  std::fill(out, out + size, Resolution{kUnknown, 0, 0, 0, 0, 0, 0, 0});
  auto* rows = reinterpret_cast<cpu::RowSample*>(Words(samples));
  const int64_t taken = cpu::DecodeDraws(received_words.data(), owner.const_data_ptr<int64_t>(),
                                         asked.const_data_ptr<int64_t>(), others, routes, first,
                                         out, Words(origins), rows, Words(which));
  Words(found)[0] = taken + cpu::PutDraws(resolutions, own.const_data_ptr<int64_t>(), count, routes,
                                          out, Words(origins), rows + taken, Words(which) + taken);
}

void EncodeReports(at::Tensor& encoded, at::Tensor& ends, const at::Tensor& reports,
                   int64_t latest) {
  CheckRecords(reports, "reports", kReportWords);
  CheckRecords(encoded, "encoded", kEncodedReportWords);
  CheckTensor(ends, "ends", at::kLong);
  const auto* records = Records<Report>(reports);
  const int64_t count = reports.size(0), num_shards = ends.numel();
  TORCH_CHECK(encoded.size(0) == count, "gear: encoded must have a row per report");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t shard = records[i].update.slot >> 32;
    TORCH_CHECK(shard >= 0 && shard < num_shards, "gear: report ", i, " must be of one of ",
                num_shards, " shards, got ", shard);
  }
  cpu::EncodeReports(records, count, latest, num_shards,
                     reinterpret_cast<cpu::EncodedReport*>(Words(encoded)), Words(ends));
}

void DecodeReports(at::Tensor& reports, const at::Tensor& encoded, int64_t latest) {
  CheckRecords(reports, "reports", kReportWords);
  CheckRecords(encoded, "encoded", kEncodedReportWords);
  TORCH_CHECK(encoded.size(0) == reports.size(0), "gear: reports must have a row per encoded one");
  cpu::DecodeReports(Records<cpu::EncodedReport>(encoded), encoded.size(0), latest,
                     reinterpret_cast<Report*>(Words(reports)));
}

}  // namespace gear
