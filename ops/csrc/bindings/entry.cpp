// The entry point of the shared library, PyInit_*.
//
// Its name differs from build to build: so it is the only source whose object the next build of the
// same sources cannot take over.
#include <Python.h>

namespace gear::python {

PyObject* MakeModule();  // of module.cpp

}  // namespace gear::python

// The name under which DeepSpeed's jit_load imports the shared library.
#define GEAR_JOIN(a, b) a##b
#define GEAR_INIT(name) GEAR_JOIN(PyInit_, name)
PyMODINIT_FUNC GEAR_INIT(TORCH_EXTENSION_NAME)() { return gear::python::MakeModule(); }
