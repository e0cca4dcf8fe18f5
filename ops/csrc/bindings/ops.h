// The ops on the CPU, checked, as torch's dispatcher and Python call them. Every op is defined,
// with shapes and dtypes, in deepspeed_gear/ops/reference.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace gear {

void Draw(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t first, int64_t total);

void Permute(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t epoch, int64_t first,
             int64_t size);

void TreeBuild(at::Tensor& sums, int64_t num_items);

void TreeUpdate(at::Tensor& sums, int64_t num_items, const at::Tensor& items,
                const at::Tensor& masses);

void SlotMasses(at::Tensor& sums, const at::Tensor& slots, const at::Tensor& log, int64_t first,
                int64_t last, at::IntArrayRef rule, int64_t unit);

void Resolve(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
             const at::Tensor& coordinates, at::IntArrayRef rule, int64_t unit, int64_t seed,
             int64_t stream, int64_t first);

void ResolveRows(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
                 const at::Tensor& row_slots, const at::Tensor& coordinates, int64_t first);

void MassOf(at::Tensor& masses, const at::Tensor& priorities, int64_t alpha, int64_t most_bits);

void Importance(at::Tensor& weights, const at::Tensor& resolutions, int64_t numerator,
                int64_t count, int64_t beta);

void MinimaBuild(at::Tensor& minima, const at::Tensor& sums, int64_t num_items);

void MinimaUpdate(at::Tensor& minima, const at::Tensor& sums, int64_t num_items,
                  const at::Tensor& items);

void TopK(at::Tensor& items, const at::Tensor& priorities, const at::Tensor& sums);

void AppendReports(at::Tensor& log, const at::Tensor& resolutions, const at::Tensor& priorities,
                   int64_t tail, int64_t batch);

void Prioritize(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities, at::Tensor& counts,
                const at::Tensor& slots, const at::Tensor& updates, at::IntArrayRef rule,
                int64_t alpha, int64_t unit, int64_t most_bits);

void SlotPriorities(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                    at::Tensor& counts, at::Tensor& bases, at::Tensor& generations,
                    at::Tensor& steps, at::Tensor& row_slots, const at::Tensor& slots,
                    const at::Tensor& log, int64_t first, int64_t last, at::IntArrayRef rule,
                    int64_t unit, int64_t initial, int64_t alpha, int64_t most_bits);

void DrawGoals(at::Tensor& goal_step, const at::Tensor& resolutions, int64_t seed, int64_t stream,
               int64_t strategy, int64_t fraction, int64_t final_row);

void PlanPacks(at::Tensor& micro, at::Tensor& rank, at::Tensor& num_micro,
               const at::Tensor& lengths, int64_t tokens, int64_t linear, int64_t quadratic,
               int64_t width, int64_t trajectories);

void SuffixSum(at::Tensor& out, const at::Tensor& reward, const at::Tensor& extents);

void NStepReturn(at::Tensor& returns, at::Tensor& discount, at::Tensor& steps,
                 const at::Tensor& reward, const at::Tensor& terminated,
                 const std::optional<at::Tensor>& truncated, const at::Tensor& powers,
                 const at::Tensor& resolutions, int64_t n);

void Gather(at::TensorList outs, at::TensorList masks, at::Tensor& counters, at::TensorList columns,
            at::TensorList shifts, at::TensorList gains, const at::Tensor& resolutions,
            const std::optional<at::Tensor>& n_steps, at::IntArrayRef spec,
            at::ArrayRef<double> pad_values, int64_t threads,
            const std::optional<at::Tensor>& order);

void EncodeRows(at::Tensor& message, at::Tensor& sizes, at::TensorList stored,
                const at::Tensor& samples, const at::Tensor& windows, const at::Tensor& members,
                const at::Tensor& columns, const at::Tensor& heads, const at::Tensor& slots);

void DecodeRows(at::TensorList arrivals, at::Tensor& ring, at::Tensor& sizes, at::Tensor& needed,
                at::TensorList messages, const at::Tensor& which, const at::Tensor& samples,
                const at::Tensor& windows, const at::Tensor& members, const at::Tensor& columns,
                const at::Tensor& heads, at::IntArrayRef room);

void Pack(at::TensorList outs, at::TensorList columns, at::TensorList shifts, at::TensorList gains,
          const at::Tensor& resolutions, const at::Tensor& places, at::IntArrayRef spec,
          at::ArrayRef<double> pad_values, int64_t first, int64_t rows);

void AssignDraws(at::Tensor& owner, at::Tensor& own, at::Tensor& points, at::Tensor& found,
                 const at::Tensor& coordinates, const at::Tensor& totals, int64_t index);

void EncodeDraws(at::Tensor& samples, at::Tensor& encoded, at::Tensor& ends,
                 const at::Tensor& records, const at::Tensor& own,
                 const std::optional<at::Tensor>& steps, const std::optional<at::Tensor>& goals,
                 const at::Tensor& readers, const at::Tensor& need_of, int64_t offset,
                 int64_t index, int64_t takes_own);

void DecodeDraws(at::Tensor& ring, at::Tensor& origins, at::Tensor& samples, at::Tensor& which,
                 at::Tensor& found, at::TensorList received, const at::Tensor& records,
                 const at::Tensor& own, const std::optional<at::Tensor>& steps,
                 const at::Tensor& owner, const at::Tensor& asked, const at::Tensor& need_of,
                 int64_t first, int64_t offset, int64_t index, int64_t takes_own);

void EncodeReports(at::Tensor& encoded, at::Tensor& ends, const at::Tensor& reports,
                   int64_t latest);

void DecodeReports(at::Tensor& reports, const at::Tensor& encoded, int64_t latest);

void CopyPieces(at::Tensor& out, at::TensorList columns, const at::Tensor& pieces);

}  // namespace gear
