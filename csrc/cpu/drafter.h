// Drafts without a model: what followed the last tokens of a text where they occurred before.
//
// A text is indexed by pairs of tokens, in chains as of LZ77: a hash table has the last place of each pair, `previous`
// the one before it.  So a token costs one insertion, and the counts of a trie of depth kDepth are read from the places:
//
//   text     .. a b c d .. x b c e .. b c d .. a b c |      the last tokens are [a b c]
//   places   of the pair (b, c), the newest kPlaces; those with the longest match stay: [a b c] once
//   drafts   the token that follows most of them, while the share of the places that agree is at least kLeastShare;
//            at most as many as tokens match
//
// A slot has three texts to look in: its own prompt and answer, the recent answers of its owner, and what its client
// predicted.  The text with the maximum sum of shares gives the drafts.
//
// A step's look-ups mostly find nothing, in memory that the model's weights have driven out of the caches since the last
// step.  So a chain holds one pair only (a miss reads one entry of the table), and `find` fetches the entries of all
// slots before it reads the first one.
//
// After "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975).

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace quire::cpu {

constexpr int kDepth = 24;           // most tokens of a match, and so of a draft
constexpr int kPlaces = 32;          // places of a pair that count, the newest
constexpr int kNewest = 8;           // places that a text keeps apart
constexpr float kLeastShare = 0.1f;  // estimated probability of a draft below which it ends
constexpr int32_t kEnd = -1;         // between the answers of an owner; no token

uint64_t pair_hash(int32_t first, int32_t second);

// A text that forgets its beginning.
class Text {
 public:
  // most: tokens to keep.  A quarter of them is forgotten at once.
  explicit Text(int64_t most) : most_(most) {}

  void append(int32_t token, uint64_t pair);  // pair: pair_hash(last(), token)
  void append(const int64_t* tokens, int64_t count);
  int64_t size() const { return static_cast<int64_t>(places_.size()) + fresh_; }
  int32_t operator[](int64_t at) const { return at_place(at).token; }
  int32_t last_place(uint64_t pair) const;  // place of the second token of a pair with this hash; -1: none
  int32_t previous(int32_t place) const { return at_place(place).previous; }
  int32_t last() const { return last_; }  // its last token; kEnd: it has none
  void prefetch(uint64_t pair) const;     // reads ahead for append and last_place

 private:
  struct Entry {
    uint32_t tag;        // lower half of the pair's hash
    int32_t place = -1;  // last place of its second token; -1: the entry is free
  };
  struct Place {
    int32_t token;
    int32_t previous = -1;  // the place before of the pair that ends here; -1: none
  };
  const Place& at_place(int64_t at) const {
    const auto kept = static_cast<int64_t>(places_.size());
    return at < kept ? places_[at] : newest_[at - kept];
  }
  void flush();
  void make_room(int64_t count);
  int32_t index(int32_t token, uint64_t pair, int32_t place);
  void rebuild(int64_t capacity);

  int64_t most_;
  int shift_ = 64;  // 64 - log2 of the entries
  int32_t last_ = kEnd;
  std::vector<Place> places_;
  Place newest_[kNewest];  // those behind `places_`: most appends then touch no other memory than a Text and its table
  int fresh_ = 0;          // number of them
  std::vector<Entry> entries_;  // open addressing, at most three quarters are used
};

struct Draft {
  int64_t slot;
  int match, source;
  std::vector<int32_t> tokens;
};

class Drafter {
 public:
  // slots: number of them · own, recent: tokens that a slot, and an owner, keeps · owners: most of them
  Drafter(int64_t slots, int64_t own, int64_t recent, int64_t owners);

  void begin(int64_t slot, const std::string& owner, const int64_t* tokens, int64_t count, int64_t prompt,
             const int64_t* predicted, int64_t predictions);
  void extend(int64_t slot, const int64_t* tokens, int64_t count);
  int64_t length(int64_t slot) const;  // tokens that the slot was given
  // Appends a token to each of these slots, and looks up every slot that has changed.  Slots without a sequence are
  // passed over.  Drafts need a match of `least` tokens.
  std::vector<Draft> find(const int64_t* slots, const int64_t* tokens, int64_t count, int least);
  void end(int64_t slot, bool keep);

 private:
  struct Owner {
    std::shared_ptr<Text> text;  // its slots have it, too
    std::list<std::string>::iterator place;
  };
  struct Slot {
    explicit Slot(int64_t most) : own(most) {}
    Text own;
    std::unique_ptr<Text> predicted;
    std::shared_ptr<Text> recent;  // answers of the owner
    int64_t length = 0;            // tokens that the slot was given
    int64_t answered = 0;          // those of them behind the prompt
    int64_t agreed = 0;            // tokens of the answer that equal the prediction from its start
    uint64_t pair = 0;             // pair_hash of the last two tokens of `own`
    bool open = false, changed = false;
  };
  std::shared_ptr<Text> answers_of(const std::string& owner);
  void push(Slot& slot, int32_t token);  // set `pair` first
  void note(int64_t number);
  void look(int64_t number, int least, std::vector<Draft>& found);

  int64_t own_, recent_, owners_;
  std::vector<Slot> slots_;
  std::vector<int64_t> changed_;
  std::list<std::string> order_;  // owners, the one used last in front
  std::unordered_map<std::string, Owner> recent_answers_;
};

}  // namespace quire::cpu
