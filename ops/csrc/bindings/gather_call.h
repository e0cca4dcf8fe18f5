// `gather_` into tensors that stay the same: reading its lists from Python takes as long as
// gathering a small batch.
#pragma once
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "bindings/direct.h"
#include "bindings/store.h"

namespace gear {

void Gather(at::TensorList outs, at::TensorList masks, at::Tensor& counters, at::TensorList columns,
            at::TensorList shifts, at::TensorList gains, const at::Tensor& resolutions,
            const std::optional<at::Tensor>& n_steps, at::IntArrayRef spec,
            at::ArrayRef<double> pad_values, int64_t threads,
            const std::optional<at::Tensor>& order);  // of library.cpp

}  // namespace gear

namespace gear::python {

struct GatherCall {
  std::vector<at::Tensor> outs, masks;
  at::Tensor counters;
  std::vector<at::Tensor> columns, shifts, gains, overwritten;
  std::vector<int64_t> spec;
  std::vector<double> pad_values;
  int64_t threads;
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
  return {
      TensorsOf(outs),       TensorsOf(masks), direct::AsTensor(counters.ptr()), TensorsOf(columns),
      TensorsOf(shifts),     TensorsOf(gains), TensorsOf(overwritten),           std::move(spec),
      std::move(pad_values), threads};
}

// Increments the versions of what it overwrites, so that a backward pass that has saved old values
// raises.
inline void GatherInto(GatherCall& call, const at::Tensor& resolutions,
                       const std::optional<at::Tensor>& n_steps) {
  for (const at::Tensor& tensor : call.overwritten) tensor.unsafeGetTensorImpl()->bump_version();
  Gather(call.outs, call.masks, call.counters, call.columns, call.shifts, call.gains, resolutions,
         n_steps, call.spec, call.pad_values, call.threads, std::nullopt);
}

inline void BindGatherCall(py::module_& module) {
  AddressedClass<GatherCall>(module, "GatherCall")
      .def(py::init(&MakeGatherCall), py::kw_only(), py::arg("outs"), py::arg("masks"),
           py::arg("counters"), py::arg("columns"), py::arg("shifts"), py::arg("gains"),
           py::arg("spec"), py::arg("pad_values"), py::arg("threads"), py::arg("overwritten"));
}

}  // namespace gear::python
