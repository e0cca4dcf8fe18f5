// Encodes and decodes the draws and the reports of priorities that nodes send each other.
#include <algorithm>
#include <utility>
#include <vector>

#include "draws/draws.h"

namespace gear::cpu {
namespace {

constexpr uint64_t kLow = 0xFFFFFFFF;

int64_t Join(int64_t high, int64_t low) {
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 |
                              (static_cast<uint64_t>(low) & kLow));
}

int64_t High(int64_t word) { return static_cast<int64_t>(static_cast<uint64_t>(word) >> 32); }

int64_t Low(int64_t word) { return static_cast<int64_t>(static_cast<uint64_t>(word) & kLow); }

// Turns counts into where each part begins.
void Begin(std::vector<int64_t>* counts) {
  int64_t before = 0;
  for (int64_t& count : *counts) before += std::exchange(count, before);
}

int64_t StepsOf(const DrawRoutes& routes, int64_t i) {
  return routes.steps == nullptr ? 0 : routes.steps[i];
}

RowSample SampleOf(const Resolution& r, int64_t peer, int64_t need, int64_t steps) {
  return {peer, need, r.slot, r.num_steps, r.anchor, steps, -1};
}

}  // namespace

int64_t AssignDraws(const int64_t* coordinates, int64_t count, const int64_t* totals,
                    int64_t num_shards, int64_t index, int64_t* owner, int64_t* own,
                    int64_t* points) {
  std::vector<int64_t> ends(totals, totals + num_shards);
  for (int64_t s = 1; s < num_shards; ++s) ends[s] += ends[s - 1];
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    owner[i] = std::upper_bound(ends.begin(), ends.end(), coordinates[i]) - ends.begin();
    if (owner[i] != index) continue;
    own[found] = i;
    points[found++] = coordinates[i] - (ends[index] - totals[index]);
  }
  return found;
}

int64_t EncodeDraws(const Resolution* records, const int64_t* own, const int64_t* goals,
                    int64_t count, const DrawRoutes& routes, RowSample* samples, int64_t* encoded,
                    int64_t* ends) {
  const auto for_each = [&](const auto& visit) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t replica = (own[i] + routes.offset) % routes.num_replicas;
      for (int64_t c = 0; c < routes.most; ++c) {
        const int64_t node = routes.readers[replica * routes.most + c];
        if (node >= 0 && (node != routes.index || routes.takes_own)) visit(i, node, replica);
      }
    }
  };
  std::vector<int64_t> place(routes.num_nodes, 0);
  for_each([&](int64_t, int64_t node, int64_t) { ++place[node]; });
  Begin(&place);
  for_each([&](int64_t i, int64_t node, int64_t replica) {
    const Resolution& r = records[i];
    const int64_t at = place[node]++, need = routes.need_of[node * routes.num_replicas + replica];
    samples[at] = SampleOf(r, node, need, StepsOf(routes, i));
    if (goals != nullptr) samples[at].goal = goals[i];
    int64_t* words = encoded + at * routes.words;
    words[0] = r.id;
    words[1] = r.mass;
    words[2] = Join(r.generation, r.slot);
    words[3] = Join(r.num_steps, r.anchor);
    if (routes.words > 4) words[4] = StepsOf(routes, i);
  });
  std::copy(place.begin(), place.end(), ends);
  return place.empty() ? 0 : place.back();
}

int64_t DecodeDraws(const int64_t* const* received, const int64_t* owner, const int64_t* asked,
                    int64_t count, const DrawRoutes& routes, int64_t first, Resolution* ring,
                    int64_t* origins, RowSample* samples, int64_t* which) {
  const int16_t* needs = routes.need_of + routes.index * routes.num_replicas;
  std::vector<int64_t> taken(routes.num_nodes, 0);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t node = owner[i], sample = asked[i];
    if (node == routes.index) continue;
    const int64_t* words = received[node] + routes.words * taken[node]++;
    const Resolution r = {words[0],       Low(words[2]), High(words[2]), 0,
                          High(words[3]), Low(words[3]), words[1],       first + sample};
    ring[sample] = r;
    origins[sample] = Join(node, r.slot);
    const int64_t need = needs[(sample + routes.offset) % routes.num_replicas];
    if (need < 0) continue;
    samples[found] = SampleOf(r, node, need, routes.words > 4 ? words[4] : 0);
    which[found++] = sample;
  }
  return found;
}

int64_t PutDraws(const Resolution* records, const int64_t* own, int64_t count,
                 const DrawRoutes& routes, Resolution* ring, int64_t* origins, RowSample* samples,
                 int64_t* which) {
  const int16_t* needs = routes.need_of + routes.index * routes.num_replicas;
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    ring[own[i]] = records[i];
    origins[own[i]] = Join(routes.index, records[i].slot);
    const int64_t need = needs[(own[i] + routes.offset) % routes.num_replicas];
    if (need < 0 || !routes.takes_own) continue;
    samples[found] = SampleOf(records[i], routes.index, need, StepsOf(routes, i));
    which[found++] = own[i];
  }
  return found;
}

void EncodeReports(const Report* reports, int64_t count, int64_t latest, int64_t num_shards,
                   EncodedReport* encoded, int64_t* ends) {
  std::vector<int64_t> place(num_shards, 0);
  for (int64_t i = 0; i < count; ++i) ++place[reports[i].update.slot >> 32];
  Begin(&place);
  for (int64_t i = 0; i < count; ++i) {
    const Report& r = reports[i];
    const bool by_id = r.number == kById, is_unknown = by_id && Low(r.update.slot) == kAnySlot;
    // The oldest batch is further back than the encoded difference can express.
    const int64_t least = latest - kMostBack;
    const int64_t back = r.batch >= latest ? 0 : r.batch <= least ? kMostBack : latest - r.batch;
    const int64_t last = is_unknown ? kUnknownById : kKnownById;
    const int64_t number = by_id ? last : r.number & kMostNumber;
    encoded[place[r.update.slot >> 32]++] = {
        is_unknown ? r.update.generation : Join(r.update.generation, r.update.slot),
        Join(static_cast<int64_t>(r.update.priority), r.update.anchor),
        static_cast<int64_t>(static_cast<uint64_t>(back) << kNumberBits |
                             static_cast<uint64_t>(number))};
  }
  std::copy(place.begin(), place.end(), ends);
}

void DecodeReports(const EncodedReport* encoded, int64_t count, int64_t latest, Report* reports) {
  for (int64_t i = 0; i < count; ++i) {
    const EncodedReport& p = encoded[i];
    const int64_t number = p.order & kMostNumber;
    const bool is_unknown = number == kUnknownById;
    const int64_t back =
        static_cast<int64_t>(static_cast<uint64_t>(p.order) >> kNumberBits) & kMostBack;
    reports[i] = {{is_unknown ? -1 : Low(p.handle), is_unknown ? p.handle : High(p.handle),
                   Low(p.value), static_cast<uint64_t>(High(p.value))},
                  latest - back,
                  number >= kKnownById ? kById : number};
  }
}

}  // namespace gear::cpu
