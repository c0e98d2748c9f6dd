"""Sampling of ids that have a token: the vocabulary of a model may have more ids than its tokenizer has tokens.

Some programs pad a vocabulary to a multiple of 64 or 128. A tokenizer.json may also omit ids.
"""


class OnlyTokens:
    """The sampling rule `choose`, limited to the tokens `ids` (an increasing array): it reads only their logits."""

    def __init__(self, choose, ids):
        self.choose, self.ids = choose, ids

    def __call__(self, logits):
        return int(self.ids[self.choose(logits[self.ids])])


def rules_for_tokens(rules, tokenizer, vocab_size):
    """Sampling rules limited to the ids that have a token, if a model's vocabulary, of `vocab_size` ids, has others."""
    ids = tokenizer.token_ids
    return rules if len(ids) >= vocab_size else [OnlyTokens(rule, ids) for rule in rules]
