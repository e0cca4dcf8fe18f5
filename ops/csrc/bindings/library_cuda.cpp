// The binding of the kernels, for the schemas that library.cpp registers. It needs a CUDA build of
// torch to be linked (a CPU build compiles it, but has no streams to give), and no header of
// c10/cuda, which lacks files in wheels: the current stream comes through torch's C shim. It is not
// part of a schema, so that torch.compile does not fix it.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "bindings/check_pieces.h"
#include "bindings/check_priorities.h"
#include "bindings/checks.h"
#include "cuda/ops.h"

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace gear {
namespace {

// Makes the tensors' device current, and gives its current stream.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& out) : guard_(out.device()) {
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(out.get_device(), &stream_) == 0,
                "gear: torch gives no stream of ", out.device());
  }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
};

void CheckDevice(const at::Tensor& tensor, const at::Tensor& out, const char* name) {
  TORCH_CHECK(tensor.device() == out.device(), "gear: ", name, " must be on ", out.device(),
              ", got ", tensor.device());
}

void Draw(at::Tensor coordinates, int64_t seed, int64_t stream, int64_t first, int64_t total) {
  CheckTensor(coordinates, "coordinates", at::kLong);
  TORCH_CHECK(total > 0, "gear: total must be positive, got ", total);
  const OnDevice device(coordinates);
  cuda::Draw(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
             static_cast<uint64_t>(total), coordinates.numel(),
             coordinates.mutable_data_ptr<int64_t>(), device.stream());
}

void Permute(at::Tensor coordinates, int64_t seed, int64_t stream, int64_t epoch, int64_t first,
             int64_t size) {
  CheckTensor(coordinates, "coordinates", at::kLong);
  CheckIndices(coordinates, first, size);
  const OnDevice device(coordinates);
  cuda::Permute(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), epoch, first,
                static_cast<uint64_t>(size), coordinates.numel(),
                coordinates.mutable_data_ptr<int64_t>(), device.stream());
}

void TreeBuild(at::Tensor sums, int64_t num_items) {
  CheckTree(sums, num_items);
  const OnDevice device(sums);
  cuda::TreeBuild(Unsigned(sums), num_items, device.stream());
}

void TreeUpdate(at::Tensor sums, int64_t num_items, const at::Tensor& items,
                const at::Tensor& masses) {
  CheckTree(sums, num_items);
  CheckTensor(items, "items", at::kLong);
  CheckTensor(masses, "masses", at::kLong);
  CheckDevice(items, sums, "items");
  CheckDevice(masses, sums, "masses");
  TORCH_CHECK(items.numel() == masses.numel(), "gear: items and masses must have equal sizes");
  const OnDevice device(sums);
  // From torch's allocator: it is reused only behind this stream's kernels.
  at::Tensor scratch = at::empty({cuda::TreeUpdateScratch(items.numel())}, items.options());
  cuda::TreeUpdate(Unsigned(sums), num_items, items.const_data_ptr<int64_t>(),
                   masses.const_data_ptr<int64_t>(), items.numel(),
                   scratch.mutable_data_ptr<int64_t>(), device.stream());
}

void Resolve(at::Tensor resolutions, const at::Tensor& sums, const at::Tensor& slots,
             const at::Tensor& coordinates, at::IntArrayRef rule, int64_t unit, int64_t seed,
             int64_t stream, int64_t first) {
  CheckResolve(resolutions, sums, slots, coordinates, rule);
  CheckDevice(sums, resolutions, "sums");
  CheckDevice(slots, resolutions, "slots");
  CheckDevice(coordinates, resolutions, "coordinates");
  const OnDevice device(resolutions);
  cuda::Resolve(reinterpret_cast<const uint64_t*>(sums.const_data_ptr<int64_t>()),
                reinterpret_cast<const Slot*>(slots.const_data_ptr<int64_t>()), slots.size(0),
                coordinates.const_data_ptr<int64_t>(), coordinates.numel(),
                AnchorRule{rule[0], rule[1], rule[2], rule[3], rule[4]}, unit,
                static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
                reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()),
                device.stream());
}

void ResolveRows(at::Tensor resolutions, const at::Tensor& sums, const at::Tensor& slots,
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

void MassOf(at::Tensor masses, const at::Tensor& priorities, int64_t alpha) {
  CheckMass(masses, priorities, alpha);
  CheckDevice(priorities, masses, "priorities");
  const OnDevice device(masses);
  cuda::MassOf(priorities.const_data_ptr<float>(), priorities.numel(), static_cast<uint64_t>(alpha),
               masses.mutable_data_ptr<int64_t>(), device.stream());
}

void Importance(at::Tensor weights, const at::Tensor& resolutions, int64_t numerator, int64_t count,
                int64_t beta) {
  CheckImportance(weights, resolutions, numerator, count, beta);
  CheckDevice(resolutions, weights, "resolutions");
  const OnDevice device(weights);
  cuda::Importance(Resolutions(resolutions), resolutions.size(0), static_cast<uint64_t>(numerator),
                   static_cast<uint64_t>(count), static_cast<uint64_t>(beta),
                   weights.mutable_data_ptr<float>(), device.stream());
}

void MinimaBuild(at::Tensor minima, const at::Tensor& sums, int64_t num_items) {
  CheckMinima(minima, sums, num_items);
  CheckDevice(sums, minima, "sums");
  const OnDevice device(minima);
  cuda::MinimaBuild(Unsigned(sums), num_items, Unsigned(minima), device.stream());
}

void MinimaUpdate(at::Tensor minima, const at::Tensor& sums, int64_t num_items,
                  const at::Tensor& items) {
  CheckMinima(minima, sums, num_items);
  CheckTensor(items, "items", at::kLong);
  CheckDevice(sums, minima, "sums");
  CheckDevice(items, minima, "items");
  const OnDevice device(minima);
  cuda::MinimaUpdate(Unsigned(sums), num_items, items.const_data_ptr<int64_t>(), items.numel(),
                     Unsigned(minima), device.stream());
}

void SuffixSum(at::Tensor out, const at::Tensor& reward, const at::Tensor& extents) {
  CheckTensor(out, "out", at::kFloat);
  CheckRecords(extents, "extents", 2);
  CheckReward(reward, out.numel());
  CheckDevice(reward, out, "reward");
  CheckDevice(extents, out, "extents");
  const OnDevice device(out);
  cuda::SuffixSum(reward.const_data_ptr(), CodeOf(reward), extents.const_data_ptr<int64_t>(),
                  extents.size(0), out.numel(), out.mutable_data_ptr<float>(), device.stream());
}

void NStepReturn(at::Tensor returns, at::Tensor discount, at::Tensor steps,
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

void Gather(at::TensorList outs, at::TensorList masks, at::Tensor counters, at::TensorList columns,
            at::TensorList shifts, at::TensorList gains, const at::Tensor& resolutions,
            const std::optional<at::Tensor>& n_steps, at::IntArrayRef spec,
            at::ArrayRef<double> pad_values, int64_t /*threads*/) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  const FieldList fields = FieldsOf(outs, masks, counters, columns, shifts, gains, resolutions,
                                    n_steps, spec, pad_values);
  for (const at::TensorList& list : {outs, masks})
    for (const at::Tensor& t : list) CheckDevice(t, counters, "every tensor");
  for (size_t f = 0; f < fields.size(); ++f) {
    if (fields[f].column != nullptr) CheckDevice(columns[f], counters, "every column");
    if (fields[f].gain != nullptr) CheckDevice(shifts[f], counters, "shift and gain");
    if (fields[f].gain != nullptr) CheckDevice(gains[f], counters, "shift and gain");
  }
  CheckDevice(resolutions, counters, "resolutions");
  if (n_steps) CheckDevice(*n_steps, counters, "n_steps");
  if (count == 0) return;
  const OnDevice device(counters);
  const int64_t* offsets = n_steps ? n_steps->const_data_ptr<int64_t>() : nullptr;
  int64_t* counter = counters.mutable_data_ptr<int64_t>();
  int64_t all = 0, bytes = 0;
  for (size_t f = 0; f < fields.size(); ++f) {
    const cpu::Field& field = fields[f];
    cuda::Gather(field, columns[f].numel() / field.elements, records, offsets, count, counter,
                 device.stream());
    all += count * field.part.count;
    bytes += count * field.part.count * field.elements * field.to_bytes;
  }
  cuda::AddToCounters(counter, all, bytes, device.stream());
}

// The columns are memory of the host that CUDA knows; nothing of the pieces outlives the call.
void CopyPieces(at::Tensor out, at::TensorList columns, const at::Tensor& pieces) {
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

TORCH_LIBRARY_IMPL(gear, CUDA, m) {
  m.impl("draw_", gear::Draw);
  m.impl("permute_", gear::Permute);
  m.impl("tree_build_", gear::TreeBuild);
  m.impl("tree_update_", gear::TreeUpdate);
  m.impl("resolve_", gear::Resolve);
  m.impl("resolve_rows_", gear::ResolveRows);
  m.impl("mass_", gear::MassOf);
  m.impl("importance_", gear::Importance);
  m.impl("minima_build_", gear::MinimaBuild);
  m.impl("minima_update_", gear::MinimaUpdate);
  m.impl("suffix_sum_", gear::SuffixSum);
  m.impl("n_step_", gear::NStepReturn);
  m.impl("gather_", gear::Gather);
  m.impl("copy_pieces_", gear::CopyPieces);
}

// The name under which DeepSpeed's jit_load imports the shared library.
#define GEAR_JOIN(a, b) a##b
#define GEAR_INIT(name) GEAR_JOIN(PyInit_, name)
PyMODINIT_FUNC GEAR_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "gear_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
