// Drafts without a model: what followed the last tokens of a text where they occurred before.
//
// A text is indexed by pairs of tokens, in chains as of LZ77: `heads` has the last place of a pair, `previous` the one
// before it.  So a token costs one insertion, and the counts of a trie of depth kDepth are read from the places:
//
//   text     .. a b c d .. x b c e .. b c d .. a b c |      the last tokens are [a b c]
//   places   of the pair (b, c), the newest kPlaces; those with the longest match stay: [a b c] once
//   drafts   the token that follows most of them, while the share of the places that agree is at least kLeastShare;
//            at most as many as tokens match
//
// A slot has three texts to look in: its own prompt and answer, the recent answers of its owner, and what its client
// predicted.  The text with the maximum sum of shares gives the drafts.
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
constexpr float kLeastShare = 0.1f;  // estimated probability of a draft below which it ends
constexpr int32_t kEnd = -1;         // between the answers of an owner; no token

// A text that forgets its beginning.
class Text {
 public:
  // most: tokens to keep.  A quarter of them is forgotten at once.
  explicit Text(int64_t most) : most_(most) {}

  void append(int32_t token);
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  int32_t operator[](int64_t at) const { return tokens_[at]; }
  int32_t last_place(int32_t first, int32_t second) const;  // place of the pair's second token; -1: none
  int32_t previous(int32_t place) const { return previous_[place]; }
  void prefetch(int32_t first, int32_t second) const;

 private:
  void insert(int64_t at);
  void rebuild();
  uint32_t bucket(int32_t first, int32_t second) const;

  int64_t most_;
  int shift_ = 32;  // 32 - bits of a bucket
  std::vector<int32_t> tokens_, previous_, heads_;
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
    std::unique_ptr<Text> own, predicted;
    std::shared_ptr<Text> recent;  // answers of the owner
    std::vector<int32_t> answer;
    int64_t length = 0;
    int64_t agreed = 0;  // tokens of the answer that equal the prediction from its start; -1: not all of them
    bool changed = false;
  };
  std::shared_ptr<Text> answers_of(const std::string& owner);
  void push(Slot& slot, int32_t token);
  void look(int64_t number, int least, std::vector<Draft>& found);

  int64_t own_, recent_, owners_;
  std::vector<Slot> slots_;
  std::vector<int64_t> changed_;
  std::list<std::string> order_;  // owners, the one used last in front
  std::unordered_map<std::string, Owner> recent_answers_;
};

}  // namespace quire::cpu
