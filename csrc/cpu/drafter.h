// Drafts without a draft model (n-gram lookup): the tokens that followed earlier occurrences of a text's last tokens.
// A *place* is a token's index in its text.  A text is indexed by pairs of tokens, in chains as in LZ77: a hash table
// has the last place of each pair, and `previous` links each place to the pair's place before it.  So each new token
// takes one insertion, and the places give the counts that a trie of depth kDepth would have:
//
//   text     .. a b c d .. x b c e .. b c d .. a b c |      the last tokens are [a b c]
//   places   of the pair (b, c), the newest kPlaces; those with the longest match stay: [a b c] once
//   drafts   the token that follows most of these places, repeated while the fraction of places that agree is at least
//            kMinShare; at most as many drafts as tokens match
// For a slot three texts are searched: its own prompt and answer, the recent answers of its owner, and the client's
// prediction.  Each gives drafts; those with the largest sum of fractions are returned.
//
// Most look-ups of a step find nothing, and read memory that the model's weights have evicted from the CPU's caches
// since the last step.  So a chain holds one pair only (a miss reads one entry of the table), and `find` prefetches the
// entries of all slots before it reads the first one.
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

constexpr int kDepth = 24;         // maximum tokens of a match, and so of a draft
constexpr int kPlaces = 32;        // newest places of a pair that are read
constexpr int kNewest = 8;         // capacity of Text::newest_
constexpr float kMinShare = 0.1f;  // minimum fraction of places that agree on a draft token
constexpr int32_t kEnd = -1;       // separates the answers of an owner; not a token

uint64_t pair_hash(int32_t first, int32_t second);

// A text of bounded length: it drops its oldest tokens.
class Text {
 public:
  // most: maximum tokens to keep.  When the text is full, its oldest quarter is dropped.
  explicit Text(int64_t most) : most_(most) {}

  void append(int32_t token, uint64_t pair);  // pair: pair_hash(last(), token)
  void append(const int64_t* tokens, int64_t count);
  int64_t size() const { return static_cast<int64_t>(places_.size()) + fresh_; }
  int32_t operator[](int64_t at) const { return at_place(at).token; }
  int32_t last_place(uint64_t pair) const;  // place of the second token of a pair with this hash; -1: none
  int32_t previous(int32_t place) const { return at_place(place).previous; }
  int32_t last() const { return last_; }  // last token; kEnd: the text is empty
  void prefetch(uint64_t pair) const;     // prefetches for append and last_place

 private:
  struct Entry {
    uint32_t tag;        // lower half of the pair's hash
    int32_t place = -1;  // last place of the pair's second token; -1: the entry is free
  };
  struct Place {
    int32_t token;
    int32_t previous = -1;  // previous place of the pair that ends here; -1: none
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
  Place newest_[kNewest];       // places after `places_`, kept in the Text itself: an append seldom accesses `places_`
  int fresh_ = 0;               // number of places in newest_
  std::vector<Entry> entries_;  // hash table with open addressing, at most three quarters full
};

struct Draft {
  int64_t slot;
  int match, source;
  std::vector<int32_t> tokens;
};

class Drafter {
 public:
  // slots: number of slots · own, recent: maximum tokens per slot and per owner · owners: maximum number of owners
  Drafter(int64_t slots, int64_t own, int64_t recent, int64_t owners);

  void begin(int64_t slot, const std::string& owner, const int64_t* tokens, int64_t count, int64_t prompt,
             const int64_t* predicted, int64_t predictions);
  void extend(int64_t slot, const int64_t* tokens, int64_t count);
  int64_t length(int64_t slot) const;  // tokens of the slot so far, including its prompt
  // Appends a token to each of these slots, and looks up every slot that has changed.  Skips slots without a sequence.
  // Drafts need a match of at least `least` tokens.
  std::vector<Draft> find(const int64_t* slots, const int64_t* tokens, int64_t count, int least);
  void end(int64_t slot, bool keep);

 private:
  struct Owner {
    std::shared_ptr<Text> text;  // shared with the owner's slots
    std::list<std::string>::iterator place;
  };
  struct Slot {
    explicit Slot(int64_t most) : own(most) {}
    Text own;
    std::unique_ptr<Text> predicted;
    std::shared_ptr<Text> recent;  // answers of the owner
    int64_t length = 0;            // tokens of the slot so far
    int64_t answered = 0;          // tokens after the prompt
    int64_t agreed = 0;            // tokens of the answer that equal the prediction from its start
    uint64_t pair = 0;             // pair_hash of the last two tokens of `own`
    bool open = false, changed = false;
  };
  std::shared_ptr<Text> answers_of(const std::string& owner);
  void push(Slot& slot, int32_t token);  // slot.pair must be set first
  void note(int64_t number);
  void look(int64_t number, int least, std::vector<Draft>& found);

  int64_t own_, recent_, owners_;
  std::vector<Slot> slots_;
  std::vector<int64_t> changed_;
  std::list<std::string> order_;  // owners, the most recently used first
  std::unordered_map<std::string, Owner> recent_answers_;
};

}  // namespace quire::cpu
