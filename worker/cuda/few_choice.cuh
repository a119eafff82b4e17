// The experts of 2 to 32 tokens, found by every block for itself: cheaper than a launch that does it once.
//
// Definitions: those of moe.cuh; TOKENS is the most that a block looks at, a launch may have fewer.
#pragma once
#include "moe.cuh"

static_assert(N_EXPERTS > 1 && TOKENS <= 32 && N_USED <= 32, "a mixture, a bit for each token, a lane for each choice");

// ids [n_tokens][N_USED] of `first` and the tokens after it: from logits, a warp a token, or as given. `keep` gets a
// warp's token, the id of each lane below N_USED and the choice. A barrier has to follow.
template <class Keep>
INLINE void find_choices(u16* ids, const Router& router, int first, int n_tokens, Keep keep) {
  for (int t = warp_id(); t < n_tokens; t += WARPS) {
    const int slot = t * N_USED + min((int)lane_id(), N_USED - 1);
#if CHOOSE
    Choice choice;
    choice.load(router.rule.logits + (u64)(first + t) * N_EXPERTS);
    choice.rank(router.rule);
    choice.choose();
    const int id = choice.id;
#else
    const Choice choice = {};
    const int id = __ldcg(router.ids + (u64)first * N_USED + slot);
#endif
    if (lane_id() < N_USED) ids[slot] = (u16)id;
    keep(t, id, choice);
  }
}

// Of lane k: the weight of the k-th expert of token `first` + t.
INLINE float choice_weight(const Router& router, const Choice& choice, int token) {
#if CHOOSE
  return choice.weight(router.rule, 1.f);
#else
  return __ldcg(router.weights + (u64)token * N_USED + min((int)lane_id(), N_USED - 1));
#endif
}

// Which tokens chose an expert, and the experts that any token chose, in order.
struct Groups {
  u32 tokens[N_EXPERTS];
  u16 chosen[N_EXPERTS < TOKENS * N_USED ? N_EXPERTS : TOKENS * N_USED];
  int n_chosen;
};

// One warp, after the barrier behind the last change of `tokens`; a barrier has to follow.
INLINE void list_chosen(Groups& groups) {
  int n = 0;
  for (int base = 0; base < N_EXPERTS; base += 32) {
    const int expert = base + lane_id();
    const bool is_chosen = expert < N_EXPERTS && groups.tokens[expert] != 0;
    const u32 all = __ballot_sync(FULL_WARP, is_chosen);
    if (is_chosen) groups.chosen[n + __popc(all & ((1u << lane_id()) - 1))] = (u16)expert;
    n += __popc(all);
  }
  if (lane_id() == 0) groups.n_chosen = n;
}
