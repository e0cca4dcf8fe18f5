// Registration of the ops on a GPU, for the schemas that library.cpp registers.
//
// This needs a CUDA build of torch to
// be linked (a CPU build compiles it, but has no streams to give), and no header of c10/cuda, which
// lacks files in wheels: the current stream comes through torch's C shim. It is not part of a
// schema, so that torch.compile does not fix it.
#define GEAR_ON_DEVICE

#include <Python.h>
#include <torch/library.h>

#include "bindings/gather_ops.h"
#include "bindings/mass_ops.h"
#include "bindings/op_table.h"
#include "bindings/ring_ops.h"
#include "common/found_fault_cuda.h"

TORCH_LIBRARY_IMPL(gear, CUDA, m) { GEAR_OPS(GEAR_IMPLEMENT) GEAR_RING_OPS(GEAR_IMPLEMENT) }
namespace {

PyObject* Fault(PyObject*, PyObject*) {
  const auto fault = gear::cuda::FindFault();
  if (!fault) Py_RETURN_NONE;
  return Py_BuildValue("sss", fault->name.c_str(), fault->rule.c_str(), fault->remedy.c_str());
}

PyMethodDef kMethods[] = {{"fault", Fault, METH_NOARGS,
                           "fault() -> (name, rule, remedy) of the fault that has ended a kernel "
                           "of this process, or None"},
                          {nullptr, nullptr, 0, nullptr}};

}  // namespace

// The name under which DeepSpeed's jit_load imports the shared library.
#define GEAR_JOIN(a, b) a##b
#define GEAR_INIT(name) GEAR_JOIN(PyInit_, name)
PyMODINIT_FUNC GEAR_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "gear_cuda",
                               nullptr,
                               -1,
                               kMethods,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
