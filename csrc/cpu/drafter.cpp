#include "cpu/drafter.h"

#include <algorithm>

namespace quire::cpu {
namespace {

constexpr int kFirstBits = 8;
constexpr int64_t kAhead = 8;  // prefetch distance of `find`, in slots

// Draft tokens found in one text that continue another text, or the same text.
struct Continuation {
  int match = 0;
  float score = 0;  // for each draft token the fraction of places that agree on it, summed
  int count = 0;
  int32_t tokens[kDepth];
};

// Token `at` of the text; kEnd: there is none.  If the text continues itself, its drafts follow its last token, because
// the text may repeat past its end.
int32_t token_at(const Text& text, const Continuation& draft, int64_t at, bool itself) {
  if (at < text.size()) return text[at];
  const int64_t beyond = at - text.size();
  return itself && beyond < draft.count ? draft.tokens[beyond] : kEnd;
}

// Extends a draft token by token: appends the token that follows most of the `places`, and keeps only those places.
void follow(const Text& text, int32_t* places, int count, bool itself, Continuation& draft) {
  const int all = count;
  while (draft.count < std::min(draft.match, kDepth)) {
    int32_t best = kEnd;
    int most = 0;
    for (int i = 0; i < count && most * 2 <= count; ++i) {
      const int32_t token = token_at(text, draft, int64_t{places[i]} + 1 + draft.count, itself);
      if (token == kEnd || token == best) continue;
      int same = 0;
      for (int j = i; j < count; ++j) {
        same += token_at(text, draft, int64_t{places[j]} + 1 + draft.count, itself) == token;
      }
      if (same > most) most = same, best = token;  // a tie goes to the newest place
    }
    const float share = static_cast<float>(most) / static_cast<float>(all);
    if (best == kEnd || share < kMinShare) return;
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if (token_at(text, draft, int64_t{places[i]} + 1 + draft.count, itself) == best) places[kept++] = places[i];
    }
    count = kept;
    draft.tokens[draft.count++] = best;
    draft.score += share;
  }
}

// Finds drafts in `text` that continue `own`.  place: last place in `text` of the last two tokens of `own`; -1: none.
Continuation continuation(const Text& own, const Text& text, int32_t place, int least) {
  Continuation draft;
  const int64_t end = own.size() - 1;
  int32_t places[kPlaces];
  int count = 0;
  for (int looked = 0; place >= 0 && looked < kPlaces; ++looked, place = text.previous(place)) {
    int match = 0;
    while (match < kDepth && match <= place && match <= end && text[place - match] == own[end - match]) ++match;
    if (match < std::max(least, draft.match)) continue;
    if (match > draft.match) count = 0;
    draft.match = match;
    places[count++] = place;
  }
  if (count > 0) follow(text, places, count, &own == &text, draft);
  return draft;
}

}  // namespace

uint64_t pair_hash(int32_t first, int32_t second) {
  uint64_t hash = (uint64_t{static_cast<uint32_t>(first)} << 32 | static_cast<uint32_t>(second)) * 0x9E3779B97F4A7C15u;
  hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
  return hash ^ hash >> 32;
}

int32_t Text::last_place(uint64_t pair) const {
  if (entries_.empty()) return -1;
  const size_t mask = entries_.size() - 1;
  for (size_t at = pair >> shift_;; at = (at + 1) & mask) {
    const Entry& entry = entries_[at];
    if (entry.place < 0 || entry.tag == static_cast<uint32_t>(pair)) return entry.place;
  }
}

void Text::prefetch(uint64_t pair) const {
  if (!entries_.empty()) __builtin_prefetch(&entries_[pair >> shift_]);
}

void Text::flush() {
  places_.insert(places_.end(), newest_, newest_ + fresh_);
  fresh_ = 0;
}

void Text::make_room(int64_t count) {
  if (size() + count > most_) {
    const int64_t forgotten = std::min(size(), std::max(size() + count - most_, std::max<int64_t>(1, most_ / 4)));
    flush();
    places_.erase(places_.begin(), places_.begin() + forgotten);
    rebuild(size() + count);
  } else if (4 * (size() + count) > 3 * static_cast<int64_t>(entries_.size())) {
    flush();
    rebuild(size() + count);
  }
}

void Text::append(int32_t token, uint64_t pair) {
  make_room(1);
  if (fresh_ == kNewest) flush();
  newest_[fresh_] = {token, index(token, pair, static_cast<int32_t>(size()))};
  ++fresh_;
}

void Text::append(const int64_t* tokens, int64_t count) {
  const int64_t first = std::max<int64_t>(0, count - most_);
  make_room(count - first);
  flush();
  for (int64_t i = first; i < count; ++i) {
    const auto token = static_cast<int32_t>(tokens[i]);
    places_.push_back({token, index(token, pair_hash(last_, token), static_cast<int32_t>(places_.size()))});
  }
}

// Records `place` as the last place of the pair (last_, token).  Returns the pair's previous place; -1: none.
int32_t Text::index(int32_t token, uint64_t pair, int32_t place) {
  int32_t before = -1;
  if (last_ != kEnd && token != kEnd) {
    const size_t mask = entries_.size() - 1;
    size_t at = pair >> shift_;
    while (entries_[at].place >= 0 && entries_[at].tag != static_cast<uint32_t>(pair)) at = (at + 1) & mask;
    before = entries_[at].place;
    entries_[at] = {static_cast<uint32_t>(pair), place};
  }
  last_ = token;
  return before;
}

// Builds the index again, with entries for `capacity` tokens.
void Text::rebuild(int64_t capacity) {
  int bits = kFirstBits;
  while (3 * (int64_t{1} << bits) < 4 * capacity) ++bits;
  shift_ = 64 - bits;
  entries_.assign(size_t{1} << bits, Entry{});
  last_ = kEnd;
  int32_t place = 0;
  for (Place& one : places_) one.previous = index(one.token, pair_hash(last_, one.token), place++);
}

Drafter::Drafter(int64_t slots, int64_t own, int64_t recent, int64_t owners)
    : own_(own), recent_(recent), owners_(owners) {
  slots_.reserve(slots);
  for (int64_t i = 0; i < slots; ++i) slots_.emplace_back(own);
}

void Drafter::begin(int64_t number, const std::string& owner, const int64_t* tokens, int64_t count, int64_t prompt,
                    const int64_t* predicted, int64_t predictions) {
  Slot& slot = slots_[number];
  slot = Slot(own_);
  slot.open = true;
  if (recent_ > 0) slot.recent = answers_of(owner);
  if (predictions > 0) {
    slot.predicted = std::make_unique<Text>(predictions);
    slot.predicted->append(predicted, predictions);
  }
  slot.length = std::min(prompt, count);
  slot.own.append(tokens, slot.length);
  if (slot.length > 1) {
    slot.pair = pair_hash(static_cast<int32_t>(tokens[slot.length - 2]), static_cast<int32_t>(tokens[slot.length - 1]));
  }
  extend(number, tokens + slot.length, count - slot.length);
  note(number);
}

// Marks a slot as changed, so that `find` looks for its drafts.
void Drafter::note(int64_t number) {
  if (!slots_[number].changed) changed_.push_back(number);
  slots_[number].changed = true;
}

std::shared_ptr<Text> Drafter::answers_of(const std::string& owner) {
  const auto at = recent_answers_.find(owner);
  if (at != recent_answers_.end()) {
    order_.splice(order_.begin(), order_, at->second.place);
    return at->second.text;
  }
  if (static_cast<int64_t>(order_.size()) >= owners_) {
    recent_answers_.erase(order_.back());
    order_.pop_back();
  }
  order_.push_front(owner);
  return recent_answers_.emplace(owner, Owner{std::make_shared<Text>(recent_), order_.begin()}).first->second.text;
}

void Drafter::push(Slot& slot, int32_t token) {
  slot.own.append(token, slot.pair);
  const int64_t at = slot.answered++;
  if (slot.predicted && slot.agreed == at && at < slot.predicted->size() && (*slot.predicted)[at] == token) {
    slot.agreed = at + 1;
  }
  slot.length += 1;
}

void Drafter::extend(int64_t number, const int64_t* tokens, int64_t count) {
  Slot& slot = slots_[number];
  if (!slot.open) return;
  for (int64_t i = 0; i < count; ++i) {
    slot.pair = pair_hash(slot.own.last(), static_cast<int32_t>(tokens[i]));
    push(slot, static_cast<int32_t>(tokens[i]));
  }
  note(number);
}

int64_t Drafter::length(int64_t number) const { return slots_[number].length; }

std::vector<Draft> Drafter::find(const int64_t* slots, const int64_t* tokens, int64_t count, int least) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {  // a Slot covers three cache lines
      const char* ahead = reinterpret_cast<const char*>(&slots_[slots[i + kAhead]]);
      for (size_t at = 0; at < sizeof(Slot); at += 64) __builtin_prefetch(ahead + at);
    }
    Slot& slot = slots_[slots[i]];
    if (!slot.open) continue;
    slot.pair = pair_hash(slot.own.last(), static_cast<int32_t>(tokens[i]));
    slot.own.prefetch(slot.pair);
    if (slot.recent) slot.recent->prefetch(slot.pair);
  }
  std::vector<Draft> found;
  for (int64_t i = 0; i < count; ++i) {
    Slot& slot = slots_[slots[i]];
    if (!slot.open) continue;
    push(slot, static_cast<int32_t>(tokens[i]));
    slot.changed = false;
    look(slots[i], std::max(2, least), found);
  }
  for (int64_t number : changed_) {
    if (slots_[number].changed && slots_[number].open) look(number, std::max(2, least), found);
    slots_[number].changed = false;
  }
  changed_.clear();
  return found;
}

void Drafter::look(int64_t number, int least, std::vector<Draft>& found) {
  const Slot& slot = slots_[number];
  const Text& own = slot.own;
  const int64_t end = own.size() - 1;
  const auto place_in = [&](const Text& text) { return end > 0 ? text.last_place(slot.pair) : -1; };
  const int32_t here = end > 0 ? own.previous(static_cast<int32_t>(end)) : -1;
  const int32_t there = slot.recent ? place_in(*slot.recent) : -1;
  if (here < 0 && there < 0 && !slot.predicted) return;
  Continuation best;
  int source = 0;
  const auto take = [&](const Continuation& other, int from) {
    if (other.score > best.score) best = other, source = from;
  };
  if (slot.predicted) {
    Continuation draft;
    if (slot.agreed == slot.answered) {  // the answer so far equals the start of the prediction
      draft.match = kDepth;
      int32_t place = static_cast<int32_t>(slot.answered - 1);
      follow(*slot.predicted, &place, 1, false, draft);
    } else {
      draft = continuation(own, *slot.predicted, place_in(*slot.predicted), least);
    }
    take(draft, 2);
  }
  if (here >= 0) take(continuation(own, own, here, least), 0);
  if (there >= 0) take(continuation(own, *slot.recent, there, least), 1);
  if (best.count > 0) {
    found.push_back({number, best.match, source, std::vector<int32_t>(best.tokens, best.tokens + best.count)});
  }
}

void Drafter::end(int64_t number, bool keep) {
  Slot& slot = slots_[number];
  if (slot.open && keep && slot.recent && slot.answered > 0) {
    std::vector<int64_t> answer{kEnd};
    for (int64_t at = std::max<int64_t>(0, slot.own.size() - slot.answered); at < slot.own.size(); ++at) {
      answer.push_back(slot.own[at]);
    }
    slot.recent->append(answer.data(), static_cast<int64_t>(answer.size()));
  }
  slot = Slot(own_);
}

}  // namespace quire::cpu
