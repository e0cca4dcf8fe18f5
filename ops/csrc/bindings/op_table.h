// The table of all ops: name in torch.ops.gear, function in C++, and torch's schema of each.
//
// The schemas, both devices' implementations and the plain functions of Python follow from
// it. deepspeed_gear/ops/reference defines an op under the same name, its functions are in *_ops.h;
// `Ops` in deepspeed_gear/ops/backends.py has a field for each.
#pragma once

// clang-format off
// On the host and on devices.
#define GEAR_OPS(OP) \
  OP(tree_build_, TreeBuild, "Tensor(a!) sums, int num_items") \
  OP(mass_, MassOf, "Tensor(a!) masses, Tensor priorities, int alpha, int most_bits") \
  OP(minima_build_, MinimaBuild, "Tensor(a!) minima, Tensor sums, int num_items") \
  OP(suffix_sum_, SuffixSum, "Tensor(a!) out, Tensor reward, Tensor extents") \
  OP(n_step_, NStepReturn, \
     "Tensor(a!) returns, Tensor(b!) discount, Tensor(c!) steps, Tensor reward, " \
     "Tensor terminated, Tensor? truncated, Tensor powers, Tensor resolutions, int n") \
  OP(advantages_, Advantages, \
     "Tensor(a!) advantage, Tensor(b!) target, Tensor reward, Tensor value, Tensor next_value, " \
     "Tensor terminated, Tensor? truncated, Tensor mask, Tensor? log_prob, " \
     "Tensor? behaviour_log_prob, float[] factors") \
  OP(gather_, Gather, \
     "Tensor(a!)[] outs, Tensor(b!)[] masks, Tensor(c!) counters, Tensor[] columns, " \
     "Tensor[] shifts, Tensor[] gains, Tensor resolutions, Tensor? n_steps, int[] spec, " \
     "float[] pad_values, int threads, Tensor? order=None")

// Only on the host: draws, and changes of masses and priorities, of tables in host memory (a table on
// a device has the ring's ops), what nodes send each other (draws, reports, rows), the goals of hindsight,
// packs and their plan. Their bytes come from the host's store and go to the host's network or back
// into the store; a device would only add two copies. A pack is copied to a device as a whole.
#define GEAR_HOST_OPS(OP) \
  OP(draw_, Draw, "Tensor(a!) coordinates, int seed, int stream, int first, int total") \
  OP(permute_, Permute, \
     "Tensor(a!) coordinates, int seed, int stream, int epoch, int first, int size") \
  OP(tree_update_, TreeUpdate, "Tensor(a!) sums, int num_items, Tensor items, Tensor masses") \
  OP(slot_masses_, SlotMasses, \
     "Tensor(a!) sums, Tensor slots, Tensor log, int first, int last, int[] rule, int unit") \
  OP(importance_, Importance, \
     "Tensor(a!) weights, Tensor resolutions, int numerator, int count, int beta") \
  OP(minima_update_, MinimaUpdate, "Tensor(a!) minima, Tensor sums, int num_items, Tensor items") \
  OP(top_k_, TopK, "Tensor(a!) items, Tensor priorities, Tensor sums") \
  OP(append_reports_, AppendReports, \
     "Tensor(a!) log, Tensor resolutions, Tensor priorities, int tail, int batch") \
  OP(prioritize_, Prioritize, \
     "Tensor(a!) sums, Tensor(b!) minima, Tensor(c!) priorities, Tensor(d!) counts, " \
     "Tensor slots, Tensor updates, int[] rule, int alpha, int unit, int most_bits") \
  OP(slot_priorities_, SlotPriorities, \
     "Tensor(a!) sums, Tensor(b!) minima, Tensor(c!) priorities, Tensor(d!) counts, " \
     "Tensor(e!) bases, Tensor(f!) generations, Tensor(g!) steps, Tensor(h!) row_slots, " \
     "Tensor slots, Tensor log, int first, int last, int[] rule, int unit, int initial, " \
     "int alpha, int most_bits") \
  OP(resolve_, Resolve, \
     "Tensor(a!) resolutions, Tensor sums, Tensor slots, Tensor coordinates, int[] rule, " \
     "int unit, int seed, int stream, int first") \
  OP(resolve_rows_, ResolveRows, \
     "Tensor(a!) resolutions, Tensor sums, Tensor slots, Tensor row_slots, " \
     "Tensor coordinates, int first") \
  OP(draw_goals_, DrawGoals, \
     "Tensor(a!) goal_step, Tensor resolutions, int seed, int stream, int strategy, " \
     "int fraction, int final_row") \
  OP(pack_, Pack, \
     "Tensor(a!)[] outs, Tensor[] columns, Tensor[] shifts, Tensor[] gains, Tensor resolutions, " \
     "Tensor places, int[] spec, float[] pad_values, int first, int rows") \
  OP(plan_packs_, PlanPacks, \
     "Tensor(a!) micro_step, Tensor(b!) rank, Tensor(c!) num_micro_steps, Tensor lengths, int tokens, " \
     "int linear, int quadratic, int width, int trajectories") \
  OP(assign_draws_, AssignDraws, \
     "Tensor(a!) owner, Tensor(b!) own, Tensor(c!) points, Tensor(d!) found, " \
     "Tensor coordinates, Tensor totals, int index") \
  OP(encode_draws_, EncodeDraws, \
     "Tensor(a!) samples, Tensor(b!) encoded, Tensor(c!) ends, Tensor records, Tensor own, " \
     "Tensor? steps, Tensor? goals, Tensor readers, Tensor need_of, int offset, int index, " \
     "int takes_own") \
  OP(decode_draws_, DecodeDraws, \
     "Tensor(a!) ring, Tensor(b!) origins, Tensor(c!) samples, Tensor(d!) which, " \
     "Tensor(e!) found, Tensor[] received, Tensor records, Tensor own, Tensor? steps, " \
     "Tensor owner, Tensor asked, Tensor need_of, int first, int offset, int index, " \
     "int takes_own") \
  OP(encode_rows_, EncodeRows, \
     "Tensor(a!) message, Tensor(b!) sizes, Tensor[] stored, Tensor samples, Tensor windows, " \
     "Tensor members, Tensor columns, Tensor heads, Tensor slots") \
  OP(decode_rows_, DecodeRows, \
     "Tensor(a!)[] arrivals, Tensor(b!) ring, Tensor(c!) sizes, Tensor(d!) needed, " \
     "Tensor[] messages, Tensor which, Tensor samples, Tensor windows, Tensor members, " \
     "Tensor columns, Tensor heads, int[] room") \
  OP(encode_reports_, EncodeReports, \
     "Tensor(a!) encoded, Tensor(b!) ends, Tensor reports, int latest") \
  OP(decode_reports_, DecodeReports, "Tensor(a!) reports, Tensor encoded, int latest")

// Of a table in the memory of one device: on the host and on devices, only through torch's
// dispatcher, so that they can be traced.
#define GEAR_RING_OPS(OP) \
  OP(ring_add_, RingAdd, \
     "Tensor(a!) state, Tensor(b!) slots, Tensor(c!) begins, Tensor(d!) sums, " \
     "Tensor(e!) minima, Tensor(f!) priorities, Tensor(g!) row_slots, Tensor(h!) placed, " \
     "Tensor lengths, int[] rule, int[] shape, int unit, int alpha, int initial, " \
     "int most_bits") \
  OP(ring_extend_, RingExtend, \
     "Tensor(a!) state, Tensor(b!) slots, Tensor(c!) opened, Tensor(d!) owners, " \
     "Tensor(e!) sums, Tensor(f!) minima, Tensor(g!) priorities, Tensor(h!) placed, " \
     "Tensor(i!) begun, Tensor(j!) truncations, Tensor terminated, Tensor? truncated, " \
     "Tensor? mask, int[] rule, int[] shape, int unit, int alpha, int initial, " \
     "int most_bits, bool next_step") \
  OP(ring_remove_, RingRemove, \
     "Tensor(a!) state, Tensor(b!) slots, Tensor(c!) sums, Tensor(d!) minima, " \
     "Tensor(e!) priorities, Tensor(f!) removed, Tensor ids, int[] shape, int unit") \
  OP(ring_select_, RingSelect, \
     "Tensor(a!) state, Tensor(b!) resolutions, Tensor(c!) weights, Tensor slots, " \
     "Tensor sums, Tensor minima, Tensor row_slots, Tensor betas, int[] rule, int[] shape, " \
     "int[] draw, int unit") \
  OP(ring_select_limited_, RingSelectLimited, \
     "Tensor(a!) state, Tensor(b!) resolutions, Tensor(c!) weights, Tensor(d!) slots, " \
     "Tensor(e!) sums, Tensor(f!) minima, Tensor betas, int[] rule, int[] shape, int[] draw, " \
     "int unit, int most") \
  OP(ring_top_k_, RingTopK, \
     "Tensor(a!) state, Tensor(b!) resolutions, Tensor(c!) weights, Tensor(d!) slots, " \
     "Tensor sums, Tensor priorities, Tensor row_slots, int[] rule, int[] shape, int[] draw, " \
     "int unit, bool counts") \
  OP(ring_epoch_, RingEpoch, \
     "Tensor(a!) state, Tensor(b!) resolutions, Tensor(c!) epochs, Tensor slots, Tensor sums, " \
     "int[] rule, int[] shape, int[] draw, int unit") \
  OP(ring_update_, RingUpdate, \
     "Tensor(a!) state, Tensor(b!) sums, Tensor(c!) minima, Tensor(d!) priorities, " \
     "Tensor slots, Tensor resolutions, Tensor values, int[] rule, int[] shape, int unit, " \
     "int alpha, int most_bits") \
  OP(scatter_, Scatter, "Tensor(a!)[] columns, Tensor[] values, Tensor placed, int[] sources")
// clang-format on

// Expansions of a list of ops, in a TORCH_LIBRARY or a TORCH_LIBRARY_IMPL of a module `m`.
#define GEAR_DEFINE(name, function, arguments) m.def(#name "(" arguments ") -> ()");
#define GEAR_IMPLEMENT(name, function, arguments) m.impl(#name, gear::function);
