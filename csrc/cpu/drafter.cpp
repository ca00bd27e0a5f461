#include "cpu/drafter.h"

#include <algorithm>

namespace quire::cpu {
namespace {

constexpr int kFirstBits = 8;

// Drafts from one text, for the end of another one (or of the same).
struct Continuation {
  int match = 0;
  float score = 0;  // sum of the shares
  int count = 0;
  int32_t tokens[kDepth];
};

// The token at `at` of the text, or of the drafts that follow it: a text may repeat itself from its end on.
int32_t token_at(const Text& text, const Continuation& draft, int64_t at, bool itself) {
  if (at < text.size()) return text[at];
  const int64_t beyond = at - text.size();
  return itself && beyond < draft.count ? draft.tokens[beyond] : kEnd;
}

// Follows `places`, whose tokens match the end, and keeps those that agree with the majority.
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
    if (best == kEnd || share < kLeastShare) return;
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if (token_at(text, draft, int64_t{places[i]} + 1 + draft.count, itself) == best) places[kept++] = places[i];
    }
    count = kept;
    draft.tokens[draft.count++] = best;
    draft.score += share;
  }
}

// `own` ends with the last token known; `text` is where its end is looked for.
Continuation continuation(const Text& own, const Text& text, int least) {
  Continuation draft;
  const bool itself = &own == &text;
  const int64_t end = own.size() - 1;
  if (end < 1 || text.size() < 2) return draft;
  int32_t places[kPlaces];
  int count = 0;
  int32_t place = text.last_place(own[end - 1], own[end]);
  if (itself && place == end) place = text.previous(place);
  for (int looked = 0; place >= 0 && looked < kPlaces; ++looked, place = text.previous(place)) {
    int match = 0;
    while (match < kDepth && match <= place && match <= end && text[place - match] == own[end - match]) ++match;
    if (match < std::max(least, draft.match)) continue;
    if (match > draft.match) count = 0;
    draft.match = match;
    places[count++] = place;
  }
  if (count > 0) follow(text, places, count, itself, draft);
  return draft;
}

}  // namespace

uint32_t Text::bucket(int32_t first, int32_t second) const {
  const uint32_t mixed = static_cast<uint32_t>(first) * 2654435761u ^ static_cast<uint32_t>(second) * 2246822519u;
  return (mixed ^ mixed >> 15) * 2654435761u >> shift_;
}

int32_t Text::last_place(int32_t first, int32_t second) const {
  return heads_.empty() ? -1 : heads_[bucket(first, second)];
}

void Text::prefetch(int32_t first, int32_t second) const {
  if (!heads_.empty()) __builtin_prefetch(&heads_[bucket(first, second)]);
}

void Text::append(int32_t token) {
  if (size() >= most_) {
    tokens_.erase(tokens_.begin(), tokens_.begin() + std::max<int64_t>(1, most_ / 4));
    rebuild();
  }
  tokens_.push_back(token);
  if (size() > static_cast<int64_t>(heads_.size())) return rebuild();
  insert(size() - 1);
}

void Text::insert(int64_t at) {
  int32_t before = -1;
  if (at > 0 && tokens_[at - 1] != kEnd && tokens_[at] != kEnd) {
    int32_t& head = heads_[bucket(tokens_[at - 1], tokens_[at])];
    before = head;
    head = static_cast<int32_t>(at);
  }
  previous_.resize(at);
  previous_.push_back(before);
}

void Text::rebuild() {
  int bits = kFirstBits;
  while (int64_t{1} << bits < 2 * size()) ++bits;
  shift_ = 32 - bits;
  heads_.assign(size_t{1} << bits, -1);
  previous_.clear();
  for (int64_t at = 0; at < size(); ++at) insert(at);
}

Drafter::Drafter(int64_t slots, int64_t own, int64_t recent, int64_t owners)
    : own_(own), recent_(recent), owners_(owners), slots_(slots) {}

void Drafter::begin(int64_t number, const std::string& owner, const int64_t* tokens, int64_t count, int64_t prompt,
                    const int64_t* predicted, int64_t predictions) {
  Slot& slot = slots_[number];
  slot = Slot{};
  slot.own = std::make_unique<Text>(own_);
  if (recent_ > 0) slot.recent = answers_of(owner);
  if (predictions > 0) {
    slot.predicted = std::make_unique<Text>(predictions);
    for (int64_t i = 0; i < predictions; ++i) slot.predicted->append(static_cast<int32_t>(predicted[i]));
  }
  const int64_t first = std::max<int64_t>(0, count - own_);
  for (int64_t i = first; i < count; ++i) {
    if (i < prompt) {
      slot.own->append(static_cast<int32_t>(tokens[i]));
    } else {
      push(slot, static_cast<int32_t>(tokens[i]));
    }
  }
  slot.length = count;
  slot.changed = true;
  changed_.push_back(number);
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
  slot.own->append(token);
  const auto at = static_cast<int64_t>(slot.answer.size());
  if (slot.predicted && slot.agreed == at && at < slot.predicted->size() && (*slot.predicted)[at] == token) {
    slot.agreed = at + 1;
  }
  slot.answer.push_back(token);
  slot.length += 1;
}

void Drafter::extend(int64_t number, const int64_t* tokens, int64_t count) {
  Slot& slot = slots_[number];
  if (!slot.own) return;
  for (int64_t i = 0; i < count; ++i) push(slot, static_cast<int32_t>(tokens[i]));
  if (!slot.changed) changed_.push_back(number);
  slot.changed = true;
}

int64_t Drafter::length(int64_t number) const { return slots_[number].length; }

std::vector<Draft> Drafter::find(const int64_t* slots, const int64_t* tokens, int64_t count, int least) {
  for (int64_t i = 0; i < count; ++i) {
    Slot& slot = slots_[slots[i]];
    if (!slot.own) continue;
    push(slot, static_cast<int32_t>(tokens[i]));
    if (!slot.changed) changed_.push_back(slots[i]);
    slot.changed = true;
    // The look-ups below wait for memory, each for its own: fetch it for all of them at once.
    const Text& own = *slot.own;
    if (const int64_t end = own.size() - 1; slot.recent && end > 0) slot.recent->prefetch(own[end - 1], own[end]);
  }
  std::vector<Draft> found;
  for (int64_t number : changed_) {
    if (slots_[number].changed && slots_[number].own) look(number, std::max(2, least), found);
    slots_[number].changed = false;
  }
  changed_.clear();
  return found;
}

void Drafter::look(int64_t number, int least, std::vector<Draft>& found) {
  Slot& slot = slots_[number];
  const Text& own = *slot.own;
  Continuation best;
  int source = 0;
  const auto take = [&](const Continuation& other, int from) {
    if (other.score > best.score) best = other, source = from;
  };
  if (slot.predicted) {
    Continuation draft;
    const auto said = static_cast<int64_t>(slot.answer.size());
    if (slot.agreed == said) {  // all of the answer so far is the prediction's beginning
      draft.match = kDepth;
      int32_t place = static_cast<int32_t>(said - 1);
      follow(*slot.predicted, &place, 1, false, draft);
    } else {
      draft = continuation(own, *slot.predicted, least);
    }
    take(draft, 2);
  }
  take(continuation(own, own, least), 0);
  if (slot.recent) take(continuation(own, *slot.recent, least), 1);
  if (best.count > 0) {
    found.push_back({number, best.match, source, std::vector<int32_t>(best.tokens, best.tokens + best.count)});
  }
}

void Drafter::end(int64_t number, bool keep) {
  Slot& slot = slots_[number];
  if (slot.own && keep && slot.recent && !slot.answer.empty()) {
    slot.recent->append(kEnd);
    for (int32_t token : slot.answer) slot.recent->append(token);
  }
  slot = Slot{};
}

}  // namespace quire::cpu
