// Steps of many environments at once: autoreset, ends and cuts of episodes, and their publication.
//
// Their open trajectories are in private memory, their first steps or whole episodes in a store.
// Thread and process safety: one thread at a time; the store's lock is taken where needed. The same
// in plain Python, which also takes what is left to it: deepspeed_gear/writer/vector_writer.py.
#pragma once
#include <cstdint>
#include <vector>

#include "store/open_trajectories.h"

namespace gear::cpu {

// Words that Python reads; it clears the number of completed trajectories.
enum StepCount : int64_t { kStepsTaken, kWholeAdded, kBegun, kNumCompleted, kStepCountWords };

// A trajectory that has ended and is stored.
struct Completed {
  int64_t env, id, num_steps;
};

struct StepColumn {
  char* base;  // of the staging
  int64_t row_bytes;
  bool is_state;  // of the state that a step leads to; else of what was done
};

enum class Autoreset { kNextStep, kSameStep, kDisabled };

// What a call did, and left to Python. kLeft: the step, and nothing has happened.
enum StepEvent : int64_t {
  kLeft = -1,
  kCompletedSome = 1,  // trajectories were completed
  kEndsLeft = 2,       // some that have ended are not stored: `unstored`
  kPublishLeft = 4,    // some steps are not published
};

struct VectorSteps {
  std::vector<StepColumn> columns;
  int64_t num_envs = 0;
  int64_t length = 0;      // steps that the staging holds of each environment
  int64_t most_steps = 0;  // of a trajectory; 0: no limit
  Autoreset autoreset = Autoreset::kDisabled;
  // In arrays of Python's. [num_envs] each
  int64_t* next = nullptr;              // row of each environment's next state
  const int64_t* first = nullptr;       // row of each environment's first state
  bool* waits = nullptr;                // for its first observation
  bool* unstored = nullptr;             // its trajectory has ended and is not stored
  bool* was_truncated = nullptr;        // its latest episode
  const bool* checks_resets = nullptr;  // one flag: Python takes the first steps after truncations
  int64_t* counts = nullptr;            // [kStepCountWords]
  Completed* completed = nullptr;       // [2 * num_envs]
  Growing* growing = nullptr;
  int64_t truncated_column = -1;  // of the role, in `columns`; an episode that is cut is marked
  // Of the table; null: Python stores and publishes.
  Store* store = nullptr;
  std::vector<const char*> sources;  // by column of the store
  bool adds = false;                 // whether whole trajectories are stored
  bool may_begin = false;            // whether first steps are published
  bool may_cut = false;              // whether longer episodes may be stored as several
  double timeout_s = 0;

  // Of the step at hand.
  std::vector<int64_t> rows, following;  // of what was done, and of states; -1: left out
  std::vector<char> starts;              // begins with the observation that the step was taken at
  bool has_ends = false, has_cuts = false;
  int64_t num_begun = 0;

  // Plans a step of all environments; false: Python must take it. `observed`: the observations that
  // the step was taken at, of the first column; null: those of the staging.
  bool Plan(const char* terminated, const char* truncated, const char* observed);
  // Takes the planned step. values: of each column, [num_envs] rows. finals: with same_step, of
  // each state column and environment, row by row; read where an episode ends.
  int64_t Take(const char* const* values, const std::vector<const char*>& finals,
               const char* observed, const char* terminated, const char* truncated, bool publish);
  // Publishes the steps of all environments. Returns false if some are left.
  bool Publish();

 private:
  bool Cut();
  bool StoreEnded(int64_t env, int64_t num_steps, bool is_cut);
  Staged StagedOf(int64_t env, int64_t num_steps) const;
  int64_t bytes_per_step() const;
  bool PublishHeld();
};

}  // namespace gear::cpu
