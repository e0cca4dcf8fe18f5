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
#include "bindings/checks.h"
#include "bindings/on_device.h"
#include "bindings/op_table.h"
#include "copies/copies.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "select/select.h"

namespace gear {
namespace {

void TreeBuild(at::Tensor& sums, int64_t num_items) {
  CheckTree(sums, num_items);
  const OnDevice device(sums);
  cuda::TreeBuild(Unsigned(sums), num_items, device.stream());
}

void MassOf(at::Tensor& masses, const at::Tensor& priorities, int64_t alpha, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  CheckMass(masses, priorities);
  CheckDevice(priorities, masses, "priorities");
  const OnDevice device(masses);
  cuda::MassOf(priorities.const_data_ptr<float>(), priorities.numel(), scale,
               masses.mutable_data_ptr<int64_t>(), device.stream());
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
