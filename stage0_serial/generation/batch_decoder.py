"""Generation of several sequences: the products of their new positions are computed together."""

import numpy as np

from gpt2core.sampler import Decoder, KVCache


class BatchDecoder(Decoder):
    """Computes the new positions of all sequences in the same products; full windows are computed one by one.

    A full window has so many rows that its products would not become faster in a batch. The caches of the sequences are
    parts of one KVCache, until their windows are full.
    """

    batch_cache = None

    def start(self, prompts, rules):
        super().start(prompts, rules)
        self.next_logits.start()
        if len(prompts) == 1:
            return
        if self.batch_cache is None:  # a decoder always has the same number of prompts
            self.batch_cache = cache = KVCache(self.model.config, self.model.backend, len(prompts))
            # A call for all sequences multiplies positions that are not yet written too, and masks the products. With
            # infinities there, NumPy would warn, and 0 * infinity is not a number. The keys are stored as the values
            # are, position by position: a step then writes one row, and reads adjacent memory.
            cache.values = [np.zeros(each.shape, each.dtype) for each in cache.values]
            cache.keys = [np.zeros(each.shape, each.dtype).swapaxes(2, 3) for each in cache.values]
        for number, sequence in enumerate(self.sequences):
            part = slice(number, number + 1)
            sequence.cache.keys = [keys[part] for keys in self.batch_cache.keys]
            sequence.cache.values = [values[part] for values in self.batch_cache.values]

    def step(self):
        config, logits = self.model.config, {}  # {number of a sequence: its logits}
        block, slides = config.block_size, not config.learns_positions
        together = {
            number: each
            for number, each in enumerate(self.sequences)
            if len(each.uncached) < block and (slides or each.cache.length < block)
        }
        if len(together) > 1:
            uncached = [each.uncached for each in together.values()]
            caches = [each.cache for each in together.values()]
            batch_cache = self.batch_cache if len(together) == len(self.sequences) else None
            logits = dict(zip(together, self.next_logits.next_positions(uncached, caches, batch_cache), strict=True))
        self.unread.append(
            [
                each.append(logits[number]) if number in logits else each.step()
                for number, each in enumerate(self.sequences)
            ]
        )
