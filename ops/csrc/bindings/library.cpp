// Registration of the ops: schemas, host functions in torch's dispatcher, functions of Python.
//
// The definition of every op, with shapes and dtypes, is in
// deepspeed_gear/ops/reference.
#include <torch/library.h>

#include "bindings/direct_calls.h"
#include "bindings/gather_ops.h"
#include "bindings/host_ops.h"
#include "bindings/mass_ops.h"
#include "bindings/message_ops.h"
#include "bindings/op_table.h"
#include "bindings/ring_ops.h"

TORCH_LIBRARY(gear, m){GEAR_OPS(GEAR_DEFINE) GEAR_HOST_OPS(GEAR_DEFINE) GEAR_RING_OPS(GEAR_DEFINE)}

TORCH_LIBRARY_IMPL(gear, CPU, m) {
  GEAR_OPS(GEAR_IMPLEMENT)
  GEAR_HOST_OPS(GEAR_IMPLEMENT)
  GEAR_RING_OPS(GEAR_IMPLEMENT)
}

namespace gear::direct {

#define GEAR_METHOD(name, function, arguments) \
  Function<gear::function, true>(#name, #name "(" arguments ") -> ()"),
PyMethodDef kOps[] = {GEAR_OPS(GEAR_METHOD)
                          GEAR_HOST_OPS(GEAR_METHOD){nullptr, nullptr, 0, nullptr}};

}  // namespace gear::direct
