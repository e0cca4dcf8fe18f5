// The binding of the kernels, for the schemas that library.cpp registers. It needs a CUDA build of
// torch to be linked (a CPU build compiles it, but has no streams to give), and no header of
// c10/cuda, which lacks files in wheels: the current stream comes through torch's C shim. It is not
// part of a schema, so that torch.compile does not fix it.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bindings/check_pieces.h"
#include "bindings/check_priorities.h"
#include "bindings/check_rows.h"
#include "bindings/checks.h"
#include "bindings/on_device.h"
#include "bindings/op_table.h"
#include "copies/copies.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "rows/rows.h"
#include "select/select.h"

namespace gear {
namespace {

void TreeBuild(at::Tensor& sums, int64_t num_items) {
  CheckTree(sums, num_items);
  const OnDevice device(sums);
  cuda::TreeBuild(Unsigned(sums), num_items, device.stream());
}

void Resolve(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
             const at::Tensor& coordinates, at::IntArrayRef rule, int64_t unit, int64_t seed,
             int64_t stream, int64_t first) {
  CheckResolve(resolutions, sums, slots, coordinates, rule);
  CheckDevice(sums, resolutions, "sums");
  CheckDevice(slots, resolutions, "slots");
  CheckDevice(coordinates, resolutions, "coordinates");
  const OnDevice device(resolutions);
  cuda::Resolve(reinterpret_cast<const uint64_t*>(sums.const_data_ptr<int64_t>()),
                reinterpret_cast<const Slot*>(slots.const_data_ptr<int64_t>()), slots.size(0),
                coordinates.const_data_ptr<int64_t>(), coordinates.numel(), AnchorsOf(rule), unit,
                static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
                reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()),
                device.stream());
}

void ResolveRows(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
                 const at::Tensor& row_slots, const at::Tensor& coordinates, int64_t first) {
  CheckResolveRows(resolutions, sums, slots, row_slots, coordinates);
  CheckDevice(sums, resolutions, "sums");
  CheckDevice(slots, resolutions, "slots");
  CheckDevice(row_slots, resolutions, "row_slots");
  CheckDevice(coordinates, resolutions, "coordinates");
  const OnDevice device(resolutions);
  cuda::ResolveRows(
      Unsigned(sums), Records<Slot>(slots), slots.size(0), row_slots.const_data_ptr<int32_t>(),
      row_slots.numel(), coordinates.const_data_ptr<int64_t>(), coordinates.numel(), first,
      reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()), device.stream());
}

void MassOf(at::Tensor& masses, const at::Tensor& priorities, int64_t alpha, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  CheckMass(masses, priorities);
  CheckDevice(priorities, masses, "priorities");
  const OnDevice device(masses);
  cuda::MassOf(priorities.const_data_ptr<float>(), priorities.numel(), scale,
               masses.mutable_data_ptr<int64_t>(), device.stream());
}

void Importance(at::Tensor& weights, const at::Tensor& resolutions, int64_t numerator,
                int64_t count, int64_t beta) {
  CheckImportance(weights, resolutions, numerator, count, beta);
  CheckDevice(resolutions, weights, "resolutions");
  const OnDevice device(weights);
  cuda::Importance(Resolutions(resolutions), resolutions.size(0), static_cast<uint64_t>(numerator),
                   static_cast<uint64_t>(count), static_cast<uint64_t>(beta),
                   weights.mutable_data_ptr<float>(), device.stream());
}

void MinimaBuild(at::Tensor& minima, const at::Tensor& sums, int64_t num_items) {
  CheckMinima(minima, sums, num_items);
  CheckDevice(sums, minima, "sums");
  const OnDevice device(minima);
  cuda::MinimaBuild(Unsigned(sums), num_items, Unsigned(minima), device.stream());
}

void SuffixSum(at::Tensor& out, const at::Tensor& reward, const at::Tensor& extents) {
  CheckTensor(out, "out", at::kFloat);
  CheckRecords(extents, "extents", 2);
  CheckReward(reward, out.numel());
  CheckDevice(reward, out, "reward");
  CheckDevice(extents, out, "extents");
  const OnDevice device(out);
  cuda::SuffixSum(reward.const_data_ptr(), CodeOf(reward), extents.const_data_ptr<int64_t>(),
                  extents.size(0), out.numel(), out.mutable_data_ptr<float>(), device.stream());
}

void NStepReturn(at::Tensor& returns, at::Tensor& discount, at::Tensor& steps,
                 const at::Tensor& reward, const at::Tensor& terminated,
                 const std::optional<at::Tensor>& truncated, const at::Tensor& powers,
                 const at::Tensor& resolutions, int64_t n) {
  const Resolution* records = Resolutions(resolutions);
  const cpu::NStep n_step =
      NStepOf(returns, discount, steps, reward, terminated, truncated, powers, resolutions, n);
  for (const at::Tensor& t : {discount, steps, reward, terminated, powers, resolutions})
    CheckDevice(t, returns, "every tensor");
  if (truncated) CheckDevice(*truncated, returns, "truncated");
  const OnDevice device(returns);
  cuda::NStepReturn(n_step, NumRows(reward, terminated, truncated), records, resolutions.size(0),
                    returns.mutable_data_ptr<float>(), discount.mutable_data_ptr<float>(),
                    steps.mutable_data_ptr<int64_t>(), device.stream());
}

void Gather(at::TensorList outs, at::TensorList masks, at::Tensor& counters, at::TensorList columns,
            at::TensorList shifts, at::TensorList gains, const at::Tensor& resolutions,
            const std::optional<at::Tensor>& n_steps, at::IntArrayRef spec,
            at::ArrayRef<double> pad_values, int64_t threads,
            const std::optional<at::Tensor>& order) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  const FieldList fields = FieldsOf(outs, masks, counters, columns, shifts, gains, resolutions,
                                    n_steps, spec, pad_values);
  const int64_t* taken = OrderOf(order, count);
  for (const at::TensorList& list : {outs, masks})
    for (const at::Tensor& t : list) CheckDevice(t, counters, "every tensor");
  c10::SmallVector<int64_t, 16> held;
  for (size_t f = 0; f < fields.size(); ++f) {
    if (fields[f].column != nullptr) CheckDevice(columns[f], counters, "every column");
    if (fields[f].gain != nullptr) CheckDevice(shifts[f], counters, "shift and gain");
    if (fields[f].gain != nullptr) CheckDevice(gains[f], counters, "shift and gain");
    held.push_back(columns[f].numel() / fields[f].elements);
  }
  CheckDevice(resolutions, counters, "resolutions");
  if (n_steps) CheckDevice(*n_steps, counters, "n_steps");
  if (order) CheckDevice(*order, counters, "order");
  const OnDevice device(counters);
  cuda::Gather(fields.data(), held.data(), static_cast<int64_t>(fields.size()), records,
               n_steps ? n_steps->const_data_ptr<int64_t>() : nullptr, taken, count,
               threads > 1 ? threads : 0, counters.mutable_data_ptr<int64_t>(), device.stream());
}

cuda::RowRequest RequestOf(const at::Tensor& samples, const at::Tensor& windows,
                           const at::Tensor& members, const at::Tensor& columns,
                           const at::Tensor& heads, int64_t num_slots) {
  CheckRecords(samples, "samples", kSampleWords);
  CheckTensor(heads, "heads", at::kLong);
  for (const at::Tensor& t : {windows, members, columns, heads})
    CheckDevice(t, samples, "every tensor");
  const cpu::RowLayout layout = ShapeOfLayout(windows, members, columns);
  constexpr int64_t kMost = int64_t{1} << 31;  // so that a group and a trajectory are one word
  TORCH_CHECK(samples.size(0) < kMost && layout.num_windows + layout.num_columns < kMost,
              "gear: too many samples, windows or columns");
  TORCH_CHECK(samples.size(0) == 0 || heads.numel() > 0, "gear: samples must have peers");
  return {Records<cpu::RowSample>(samples), samples.size(0), layout, members.size(0), num_slots,
          heads.const_data_ptr<int64_t>(),  heads.numel()};
}

c10::SmallVector<cuda::Bytes, 16> ColumnsOf(at::TensorList tensors, const cpu::RowLayout& layout,
                                            const at::Tensor& samples) {
  CheckNumColumns(tensors, layout);
  c10::SmallVector<cuda::Bytes, 16> columns;
  for (const at::Tensor& tensor : tensors) {
    columns.push_back({CharsOf(tensor), BytesOf(tensor, "columns")});
    CheckDevice(tensor, samples, "every column");
  }
  return columns;
}

void EncodeRows(at::Tensor& message, at::Tensor& sizes, at::TensorList stored,
                const at::Tensor& samples, const at::Tensor& windows, const at::Tensor& members,
                const at::Tensor& columns, const at::Tensor& heads, const at::Tensor& slots) {
  CheckRecords(slots, "slots", kSlotWords);
  CheckTensor(message, "message", at::kLong);
  for (const at::Tensor& t : {message, sizes, slots}) CheckDevice(t, samples, "every tensor");
  const cuda::RowRequest request =
      RequestOf(samples, windows, members, columns, heads, slots.size(0));
  const auto data = ColumnsOf(stored, request.layout, samples);
  int64_t* filled = LongsOf(sizes, "sizes", request.num_peers);
  const OnDevice device(message);
  at::Tensor scratch = ScratchFor(cuda::RowsScratch(request), samples);
  cuda::EncodeRows(request, Records<Slot>(slots), data.data(), filled, CharsOf(message),
                   kWordBytes * message.numel(), scratch.mutable_data_ptr<int64_t>(),
                   device.stream());
}

void DecodeRows(at::TensorList arrivals, at::Tensor& ring, at::Tensor& sizes, at::Tensor& needed,
                at::TensorList messages, const at::Tensor& which, const at::Tensor& samples,
                const at::Tensor& windows, const at::Tensor& members, const at::Tensor& columns,
                const at::Tensor& heads, at::IntArrayRef room) {
  CheckRecords(ring, "ring", kResolutionWords);
  CheckTensor(which, "which", at::kLong);
  for (const at::Tensor& t : {ring, sizes, needed, which}) CheckDevice(t, samples, "every tensor");
  const cuda::RowRequest request = RequestOf(samples, windows, members, columns, heads, kMostSteps);
  TORCH_CHECK(which.numel() == request.count,
              "gear: which must have an index of the ring per sample");
  const auto data = ColumnsOf(arrivals, request.layout, samples);
  CheckMessages(messages, request.num_peers);
  c10::SmallVector<cuda::Bytes, 16> message_bytes;
  for (const at::Tensor& message : messages) {
    CheckDevice(message, samples, "every message");
    message_bytes.push_back({CharsOf(message), kWordBytes * message.numel()});
  }
  int64_t* filled = LongsOf(sizes, "sizes", request.num_peers);
  const OnDevice device(ring);
  at::Tensor scratch = ScratchFor(cuda::RowsScratch(request), samples);
  cuda::DecodeRows(
      request, data.data(), message_bytes.data(), RoomOf(room), which.const_data_ptr<int64_t>(),
      ring.size(0), reinterpret_cast<Resolution*>(ring.mutable_data_ptr<int64_t>()), filled,
      LongsOf(needed, "needed", 2), scratch.mutable_data_ptr<int64_t>(), device.stream());
}

// The columns are host memory registered with CUDA; the pieces are not used after the call.
void CopyPieces(at::Tensor& out, at::TensorList columns, const at::Tensor& pieces) {
  const std::vector<Piece> found = PiecesOf(out, columns, pieces);
  std::vector<const void*> from;
  std::vector<void*> to;
  std::vector<int64_t> bytes;
  for (const Piece& piece : found) {
    from.push_back(piece.from);
    to.push_back(piece.to);
    bytes.push_back(piece.bytes);
  }
  const OnDevice device(out);
  cuda::CopyPieces(from.data(), to.data(), bytes.data(), static_cast<int64_t>(found.size()),
                   device.stream());
}

}  // namespace
}  // namespace gear

TORCH_LIBRARY_IMPL(gear, CUDA, m){GEAR_OPS(GEAR_IMPLEMENT)}
// The name under which DeepSpeed's jit_load imports the shared library.
#define GEAR_JOIN(a, b) a##b
#define GEAR_INIT(name) GEAR_JOIN(PyInit_, name)
PyMODINIT_FUNC GEAR_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "gear_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
