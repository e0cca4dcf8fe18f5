// `gather_` with arguments that are read and checked once, for tensors that stay the same.
//
// Reading its lists from Python and checking them takes as long as gathering a small batch.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/direct_calls.h"
#include "bindings/gather_ops.h"
#include "bindings/store.h"

namespace gear::python {

// A tensor as it was when it was checked: its memory, size and dtype.
struct KnownTensor {
  const void* data;
  int64_t numel;
  at::ScalarType type;

  explicit KnownTensor(const at::Tensor& tensor)
      : data(tensor.const_data_ptr()), numel(tensor.numel()), type(tensor.scalar_type()) {}

  bool IsOf(const at::Tensor& tensor) const {
    return tensor.const_data_ptr() == data && tensor.numel() == numel &&
           tensor.scalar_type() == type && tensor.is_contiguous();
  }
};

struct GatherCall {
  std::vector<at::Tensor> outs, masks;
  at::Tensor counters;
  std::vector<at::Tensor> columns, shifts, gains, overwritten;
  std::vector<int64_t> spec;
  std::vector<double> pad_values;
  int64_t threads;
  // The fields for `num_samples` samples, and the tensors that they were checked against.
  std::optional<CheckedFields> checked;
  int64_t num_samples = -1;
  std::vector<KnownTensor> known;

  // Gathers samples. A program may have given a tensor of a batch other memory, or another form:
  // then they are all checked again, so that an unfit one is an error. `next`: as in GatherChecked.
  void Run(const Resolution* records, int64_t count, const std::optional<at::Tensor>& n_steps,
           const Resolution* next = nullptr) {
    // A backward pass that has saved old values raises.
    for (const at::Tensor& tensor : overwritten) tensor.unsafeGetTensorImpl()->bump_version();
    if (count != num_samples || !AreKnown()) Check(count);
    checked->CheckSteps(n_steps.has_value());
    const int64_t* steps = n_steps ? Values<int64_t>(*n_steps, "n_steps", count) : nullptr;
    GatherChecked(*checked, records, steps, count, threads, counters.mutable_data_ptr<int64_t>(),
                  next);
  }

 private:
  template <typename Visit>
  bool AllTensors(const Visit& visit) const {
    for (const std::vector<at::Tensor>* list : {&outs, &masks, &columns, &shifts, &gains})
      for (const at::Tensor& tensor : *list)
        if (!visit(tensor)) return false;
    return visit(counters);
  }

  bool AreKnown() const {
    const KnownTensor* next = known.data();
    return AllTensors([&](const at::Tensor& tensor) { return (next++)->IsOf(tensor); });
  }

  void Check(int64_t count) {
    num_samples = -1;
    Values<int64_t>(counters, "counters");
    TORCH_CHECK(counters.numel() >= 3, "gear: counters must have 3 elements");
    checked.emplace(outs, masks, columns, shifts, gains, spec, pad_values, count,
                    Device(counters, "every tensor"));
    known.clear();
    AllTensors([&](const at::Tensor& tensor) {
      known.emplace_back(tensor);
      return true;
    });
    num_samples = count;
  }
};

inline std::vector<at::Tensor> TensorsOf(const py::handle& list) {
  std::vector<at::Tensor> tensors;
  ForEach(list.ptr(), [&](PyObject* item) { tensors.push_back(direct::AsTensor(item)); });
  return tensors;
}

inline GatherCall MakeGatherCall(const py::object& outs, const py::object& masks,
                                 const py::object& counters, const py::object& columns,
                                 const py::object& shifts, const py::object& gains,
                                 std::vector<int64_t> spec, std::vector<double> pad_values,
                                 int64_t threads, const py::object& overwritten) {
  GatherCall call{};
  call.outs = TensorsOf(outs);
  call.masks = TensorsOf(masks);
  call.counters = direct::AsTensor(counters.ptr());
  call.columns = TensorsOf(columns);
  call.shifts = TensorsOf(shifts);
  call.gains = TensorsOf(gains);
  call.overwritten = TensorsOf(overwritten);
  call.spec = std::move(spec);
  call.pad_values = std::move(pad_values);
  call.threads = threads;
  return call;
}

inline void GatherInto(GatherCall& call, const at::Tensor& resolutions,
                       const std::optional<at::Tensor>& n_steps) {
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  call.Run(records, count, n_steps);
}

inline void BindGatherCall(py::module_& module) {
  AddressedClass<GatherCall>(module, "GatherCall")
      .def(py::init(&MakeGatherCall), py::kw_only(), py::arg("outs"), py::arg("masks"),
           py::arg("counters"), py::arg("columns"), py::arg("shifts"), py::arg("gains"),
           py::arg("spec"), py::arg("pad_values"), py::arg("threads"), py::arg("overwritten"));
}

}  // namespace gear::python
