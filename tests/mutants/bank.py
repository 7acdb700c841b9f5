"""Deliberate faults: small wrong versions of the scheduler, the pools, the policies and the loop.

Each is a fault that somebody made: engines that were read or run, the layer that this package grew from, or ourselves
while writing. Each names one test that fails because of it. `python -m tests.mutants.bank` prints them as a table.

A fault is a replaced snippet of source. A snippet that the code no longer has makes the bank stale, and the test says
so: then write the fault anew, or drop it if it can no longer be made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One deliberate fault.

    Args:
        name: the fault in a few words.
        what: what it does wrong.
        file: module of the package in which it is made.
        old: a snippet that occurs once in that module.
        new: what is there instead.
        caught_by: the test that fails because of it.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    caught_by: str

    def apply(self, source: str) -> str:
        """The module with this fault in it.

        Raises:
            ValueError: the snippet does not occur exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name!r} is stale: its snippet occurs {count} times in contbatch/{self.file}")
        return source.replace(self.old, self.new)


POOL = [
    Mutant(
        "round blocks down",
        "tokens are counted where blocks are needed: the last, partial block is forgotten",
        "blocks.py",
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size",
        "tests/test_blocks.py::test_blocks_needed[1-1]",
    ),
    Mutant(
        "free twice",
        "a block that nobody holds can be given back, so it is in the free list twice",
        "blocks.py",
        "if len(set(blocks)) < len(blocks) or not all(self.ref_count[block] > 0 for block in blocks):",
        "if len(set(blocks)) < len(blocks):",
        "tests/test_blocks.py::test_double_free_is_an_error_and_changes_nothing",
    ),
    Mutant(
        "count one holder",
        "a shared block counts one holder however many there are, so the first to end frees it for all",
        "blocks.py",
        "self.ref_count[block] += 1",
        "self.ref_count[block] = 1",
        "tests/test_blocks.py::test_a_shared_block_is_free_when_in_no_table",
    ),
    Mutant(
        "leave a hit in the free list",
        "a cached block that is taken into use stays in the free list and is handed out to somebody else",
        "blocks.py",
        "                del self._free[block]\n",
        "",
        "tests/test_blocks.py::test_sharing_a_free_block_takes_it_out_of_the_free_list",
    ),
    Mutant(
        "hand out what is left",
        "a pool that has too few blocks hands out those it has, instead of none",
        "blocks.py",
        "        if count > len(self._free):\n            return None\n",
        "        count = min(count, len(self._free))\n",
        "tests/test_blocks.py::test_b087_a_refusal_changes_nothing",
    ),
    Mutant(
        "free the head first",
        "blocks go to the free list in table order, so a prefix is reused before what follows it",
        "blocks.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        "tests/test_blocks.py::test_unknown_blocks_are_reused_first_and_known_ones_least_recently_used_first",
    ),
    Mutant(
        "reuse the unknown last",
        "blocks that nobody can find again go to the back of the free list, so cached ones are reused before them",
        "blocks.py",
        "            self._free.move_to_end(block, last=False)\n",
        "",
        "tests/test_blocks.py::test_unknown_blocks_keep_their_tail_first_order_as_a_group",
    ),
    Mutant(
        "keep old content in the index",
        "a block that is handed out again is still found by the tokens it held before",
        "blocks.py",
        "                self.forget(block)\n            self.ref_count[block] = 1",
        "                self._num_cached -= 1\n            self.ref_count[block] = 1",
        "tests/test_blocks.py::test_reuse_drops_the_content_from_the_index",
    ),
    Mutant(
        "trust the hash",
        "two prompts whose hashes collide share a block, though their tokens differ",
        "blocks.py",
        "if block is None or self._keys[block] != key:",
        "if block is None:",
        "tests/test_blocks.py::test_b119_a_hash_collision_gives_no_wrong_hit",
    ),
    Mutant(
        "hash a block alone",
        "the hash of a block leaves out what comes before it",
        "blocks.py",
        'sha256(parent + array("Q", token_ids).tobytes())',
        'sha256(array("Q", token_ids).tobytes())',
        "tests/test_blocks.py::test_b120_a_block_is_known_by_all_that_comes_before_it",
    ),
    Mutant(
        "hit across a gap",
        "a hit goes on behind a block that is not cached",
        "blocks.py",
        "                break\n",
        "                continue\n",
        "tests/test_blocks.py::test_a_lookup_is_the_longest_run_from_the_start",
    ),
    Mutant(
        "forget every copy",
        "when one of two blocks with the same content is reused, the other one is not found any more",
        "blocks.py",
        "        del holders[block]\n        if not holders:\n            del self._index[key.hash]",
        "        del self._index[key.hash]",
        "tests/test_blocks.py::test_two_blocks_with_one_content_are_both_known",
    ),
]

QUEUE_AND_BUDGET = [
    Mutant(
        "newest of equals first",
        "of two requests with the same key the later one is next",
        "waiting.py",
        "(self._safe_key(request), request.index, self._num_pushed, request)",
        "(self._safe_key(request), -request.index, self._num_pushed, request)",
        "tests/test_scheduler.py::test_equal_queue_keys_keep_the_order_of_arrival",
    ),
    Mutant(
        "disorder after a removal",
        "after somebody in the middle of the queue was aborted, its order by key is lost",
        "waiting.py",
        "            heapq.heappop(self._heap)\n",
        "            self._heap.pop(0)\n",
        "tests/test_rules_more.py::test_a_queue_by_key_keeps_its_order_whoever_leaves_it",
    ),
    Mutant(
        "count the queue upwards",
        "tokens of requests that left the queue are still counted in it, until it is full for ever",
        "waiting.py",
        "        self.num_tokens -= len(request.token_ids)\n",
        "",
        "tests/test_liveness.py::test_a_queue_is_limited_in_tokens_too",
    ),
    Mutant(
        "one too many in the queue",
        "the queue takes one request more than max_num_queued_reqs",
        "scheduler.py",
        "queued >= config.max_num_queued_reqs",
        "queued > config.max_num_queued_reqs",
        "tests/test_liveness.py::test_a_full_queue_refuses_one_more_request_and_has_room_after_an_admission",
    ),
    Mutant(
        "owe tokens in flight",
        "a request owes the tokens again that a plan has granted and nobody has computed yet",
        "request.py",
        " - self.num_computed_tokens - self.num_in_flight",
        " - self.num_computed_tokens",
        "tests/test_request.py::test_tokens_in_flight_are_not_owed_twice",
    ),
    Mutant(
        "reset the wrong counter",
        "a new step starts with the decode tokens of the last one already spent",
        "budget.py",
        "self.prefill_tokens = self.decode_tokens = self.num_seqs = 0",
        "self.prefill_tokens = self.num_seqs = 0",
        "tests/test_parity.py::test_token_budget_new_fields_reset_total_tokens",
    ),
    Mutant(
        "spend what was refused",
        "a prompt that does not fit in the budget uses it up all the same",
        "budget.py",
        "        if num_tokens > self.remaining_prefill:\n            return False\n"
        "        self.prefill_tokens += num_tokens\n",
        "        self.prefill_tokens += num_tokens\n"
        "        if self.total_tokens > self.max_total_tokens:\n            return False\n",
        "tests/test_parity.py::test_try_allocate_prefill",
    ),
    Mutant(
        "two limits without a total",
        "prefill and decode each keep to their own limit and together exceed the total",
        "budget.py",
        "return max(0, min(own, self.max_total_tokens - self.total_tokens))",
        "return max(0, own)",
        "tests/test_parity.py::test_remaining_prefill_and_remaining_decode",
    ),
]

PLAN = [
    Mutant(
        "drop the start position",
        "a chunk that starts at 512 is fed in as if it started at 0",
        "plan.py",
        "            self.start_position,\n            self.is_last_chunk,",
        "            0,\n            self.is_last_chunk,",
        "tests/test_parity.py::test_to_scheduled_batch",
    ),
    Mutant(
        "sample after every chunk",
        "the first chunk of a long prompt already yields a token",
        "plan.py",
        "            end == request.prefill_end,",
        "            True,",
        "tests/test_scheduler.py::test_a_task_that_stops_short_of_the_end_samples_nothing",
    ),
    Mutant(
        "freeze the context",
        "the context of a decode stays at the length of the prompt",
        "plan.py",
        "            tuple(request.block_table),\n            start,\n        )",
        "            tuple(request.block_table),\n            request.num_prompt_tokens,\n        )",
        "tests/test_parity.py::test_fault_03_context_grows_with_each_decode",
    ),
    Mutant(
        "no work in a swap",
        "a step that only moves blocks is not executed, so they are never copied",
        "plan.py",
        "return bool(self.total_requests or moves)",
        "return bool(self.total_requests)",
        "tests/test_parity.py::test_empty_has_work_total_requests_total_tokens",
    ),
]

VERBS = [
    Mutant(
        "hit the whole prompt",
        "a prompt that is cached to its end computes no token, so there is nothing to sample from",
        "step.py",
        "(len(request.token_ids) - 1) // size)",
        "len(request.token_ids) // size)",
        "tests/test_scheduler.py::test_b110_a_hit_covers_whole_blocks_and_never_the_last_token",
    ),
    Mutant(
        "believe every hit",
        "blocks that were reused since the cache was asked are taken for a hit",
        "step.py",
        "        self._check_hit(request, hit)\n",
        "",
        "tests/test_scheduler.py::test_b121_a_stale_hit_is_refused",
    ),
    Mutant(
        "use a hit without holding it",
        "the blocks of a hit are used but not counted, and can be handed out to somebody else",
        "step.py",
        "        self._pool.share(shared)\n",
        "",
        "tests/test_scheduler.py::test_a_shorter_hit_than_what_is_cached_is_allowed",
    ),
    Mutant(
        "count cached blocks as free and as hit",
        "a hit on free blocks is taken to cost none, and admission then finds too few",
        "step.py",
        "must_fit + self._pool.num_unreferenced(shared) + spare",
        "must_fit + spare",
        "tests/test_policies.py::test_with_the_cache_a_victim_hits_its_own_blocks",
    ),
    Mutant(
        "spend the spare blocks",
        "an admission takes the blocks that have to stay free for those who run",
        "step.py",
        "self._pool.num_unreferenced(shared) + spare",
        "self._pool.num_unreferenced(shared)",
        "tests/test_scheduler.py::test_spare_and_fit_keep_blocks_free",
    ),
    Mutant(
        "grant twice",
        "a request can get tokens twice in one step",
        "step.py",
        "        if request.num_in_flight:\n            raise",
        "        if request.num_in_flight < 0:\n            raise",
        "tests/test_scheduler.py::test_a_wrong_policy_is_refused_and_undone[grant twice]",
    ),
    Mutant(
        "a whole budget for each",
        "each request may take the whole budget of a step, whatever the others got",
        "step.py",
        "        left = self.tokens_left(request)\n        if num_tokens > left:",
        "        left = self.budget.max_total_tokens\n        if num_tokens > left:",
        "tests/test_scheduler.py::test_a_wrong_policy_is_refused_and_undone[budget]",
    ),
    Mutant(
        "more than the seats",
        "requests are admitted though max_num_seqs run already",
        "step.py",
        "        if self.seats_left < 1:\n            raise",
        "        if self.seats_left < -1:\n            raise",
        "tests/test_scheduler.py::test_b052_no_more_than_max_num_seqs_run",
    ),
    Mutant(
        "admit the victim",
        "who was preempted in a step is admitted in the same step",
        "step.py",
        "if request in self.victims:\n            raise",
        "if request in ():\n            raise",
        "tests/test_scheduler.py::test_a_preemption_stands_when_the_policy_fails_afterwards",
    ),
    Mutant(
        "decode in hash order",
        "running requests are served in the order of a hash table of their ids",
        "step.py",
        "        scheduler.running.append(request)\n",
        "        scheduler.running.append(request)\n"
        "        scheduler.running.sort(key=lambda running: hash(running.request_id))\n",
        "tests/test_parity.py::test_fault_04_decode_order_is_fixed_and_nobody_starves",
    ),
    Mutant(
        "a block too late",
        "a decode at a block boundary gets no block, and writes its token past the end of its table",
        "step.py",
        "if len(request.block_table) * self.config.block_size > start:",
        "if len(request.block_table) * self.config.block_size >= start:",
        "tests/test_policies.py::test_b040_a_prompt_that_fills_its_blocks_decodes_on[4]",
    ),
    Mutant(
        "forget decodes that were granted",
        "when blocks run out amid the decodes, those before are not counted in the budget",
        "step.py",
        "                    self.budget.count_decodes(fast)\n                    return request",
        "                    return request",
        "tests/test_rules_more.py::test_decodes_before_a_preemption_count_in_the_budget",
    ),
    Mutant(
        "a free block for every decode",
        "a decode needs a free block even if its last one has room (as in Sarathi-Serve)",
        "step.py",
        "if not offset and not self._take_block(request, start):",
        "if not self._pool.num_free or (not offset and not self._take_block(request, start)):",
        "tests/test_policies.py::test_b080_a_decode_may_take_the_last_block",
    ),
    Mutant(
        "never continue a prompt",
        "a prompt that was cut gets its first chunk and no other",
        "step.py",
        "if decodes is not None and is_decode is not decodes:",
        "if not is_decode or decodes is False:",
        "tests/test_parity.py::test_fault_01_chunked_prefill_continues_to_its_end[VllmV1]",
    ),
    Mutant(
        "forget where the prompt ends",
        "what a preempted request computes again passes for decoding, one token in a step",
        "step.py",
        "        if not request.host_table:\n            request.prefill_end = len(request.token_ids)\n",
        "",
        "tests/test_policies.py::test_b058_a_resumed_request_computes_all_it_knows_in_chunks",
    ),
    Mutant(
        "keep the tokens of a victim's grant",
        "tokens that a victim was granted in this step are lost to the budget",
        "step.py",
        '        self.budget.refund(**{"decode" if kind == "D" else "prefill": count})\n',
        "",
        "tests/test_scheduler.py::test_a_victims_grant_of_this_step_goes_back_to_the_budget",
    ),
    Mutant(
        "index what was never computed",
        "blocks that were planned for a victim in the same step stay in the prefix index (as in vLLM)",
        "step.py",
        "        self._scheduler.forget_blocks(request, undo.num_hashed_blocks)\n        self._new_blocks",
        "        request.num_hashed_blocks = undo.num_hashed_blocks\n        self._new_blocks",
        "tests/test_scheduler.py::test_blocks_planned_in_a_step_can_be_hit_in_it_and_leave_the_index_if_it_fails",
    ),
    Mutant(
        "take shared blocks back",
        "a grant is undone though somebody admitted after it already shares its planned blocks",
        "step.py",
        "if any(self._pool.ref_count[block] > 1 for block in planned):",
        "if not planned and any(self._pool.ref_count[block] > 1 for block in planned):",
        "tests/test_scheduler.py::test_take_back_from_one_whose_planned_blocks_are_shared_is_refused",
    ),
    Mutant(
        "undo the first grant first",
        "a failed step is undone in the order of granting, while later requests still share what earlier ones planned",
        "step.py",
        "for request in reversed(list(self._grants.requests)):",
        "for request in list(self._grants.requests):",
        "tests/test_scheduler.py::test_blocks_planned_in_a_step_can_be_hit_in_it_and_leave_the_index_if_it_fails",
    ),
    Mutant(
        "lose one's place",
        "a request whose admission is undone goes to the back of the queue",
        "step.py",
        "self._scheduler.waiting.insert(undo.place, request)",
        "self._scheduler.waiting.push(request)",
        "tests/test_scheduler.py::test_take_back_returns_tokens_blocks_and_place",
    ),
    Mutant(
        "drop outputs on preemption",
        "a victim's generated tokens are thrown away, and its client sees the text start anew",
        "step.py",
        "        request.num_preemptions += 1\n",
        "        request.num_preemptions += 1\n        del request.token_ids[request.num_prompt_tokens :]\n",
        "tests/test_scheduler.py::test_b068_a_preemption_keeps_every_token_once",
    ),
    Mutant(
        "count max_tokens again",
        "a victim's outputs become part of its prompt, and max_tokens counts from zero again",
        "step.py",
        "        request.num_preemptions += 1\n",
        "        request.num_preemptions += 1\n"
        "        request.max_total_tokens = len(request.token_ids) + request.max_tokens\n",
        "tests/test_policies.py::test_b058_a_resumed_request_computes_all_it_knows_in_chunks",
    ),
    Mutant(
        "the victim queues last",
        "a victim waits behind everybody who came after it",
        "step.py",
        "            self._scheduler.waiting.insert(0, request)",
        "            self._scheduler.waiting.push(request)",
        "tests/test_scheduler.py::test_a_victim_goes_to_the_front_or_to_the_back",
    ),
    Mutant(
        "evict a request that has a task",
        "a victim keeps the tokens that it was granted in this step, and is computed without blocks",
        "step.py",
        "        if request.num_in_flight:\n            self._take_back(request)\n",
        "",
        "tests/test_policies.py::test_priority_evicts_the_least_urgent_even_if_it_was_granted_already",
    ),
    Mutant(
        "lose the victim",
        "a victim is in no queue any more",
        "step.py",
        "        else:\n            self._scheduler.waiting.insert(0, request)\n",
        "",
        "tests/test_scheduler.py::test_b067_preempting_twice_changes_nothing_more",
    ),
    Mutant(
        "keep the progress of a victim",
        "the wrong counter is reset: a victim without blocks still counts its tokens as computed",
        "step.py",
        "            request.num_computed_tokens = 0\n\n    # The end of planning",
        "            request.high_water = 0\n\n    # The end of planning",
        "tests/test_scheduler.py::test_b067_preempting_twice_changes_nothing_more",
    ),
]

SWAP = [
    Mutant(
        "copy twice",
        "full blocks that host memory holds already are copied again",
        "step.py",
        "self.swap_outs += moves[stored.num_known :]",
        "self.swap_outs += moves",
        "tests/test_swap.py::test_who_goes_a_second_time_copies_only_what_is_new",
    ),
    Mutant(
        "leave the last block behind",
        "only full blocks go to host memory, and the tokens of the last one are missing afterwards",
        "step.py",
        "        count = blocks_needed(request.num_computed_tokens, size)\n",
        "        count = request.num_computed_tokens // size\n",
        "tests/test_swap.py::test_it_goes_on_in_the_middle_of_its_prompt",
    ),
    Mutant(
        "swap into memory that is full",
        "a victim for which host memory has no room counts as swapped out, instead of being computed again",
        "step.py",
        "            self.skip(request, BlockReason.HOST_BLOCKS, count, host.num_free)\n            return False",
        "            self.skip(request, BlockReason.HOST_BLOCKS, count, host.num_free)\n            return True",
        "tests/test_swap.py::test_a_victim_without_room_is_computed_again_and_the_trace_says_so",
    ),
    Mutant(
        "swap in without the copy",
        "a request that comes back gets blocks, but not what was in them",
        "step.py",
        "self.swap_ins[request.request_id] = moved",
        "self.swap_ins[request.request_id] = []",
        "tests/test_swap.py::test_it_goes_on_in_the_middle_of_its_prompt",
    ),
    Mutant(
        "copy into the neighbour",
        "where part of a table is still on the device, the rest is copied from the wrong host blocks",
        "step.py",
        "moved = list(zip(request.host_table, table, strict=False))[len(shared) :]",
        "moved = list(zip(request.host_table, table[len(shared) :], strict=False))",
        "tests/test_swap.py::test_what_the_device_still_has_is_not_copied_back",
    ),
    Mutant(
        "give host blocks back early",
        "host blocks are free as soon as the way back is planned, before anything was copied",
        "step.py",
        "self.swap_ins[request.request_id] = moved",
        "self.swap_ins[request.request_id] = moved\n            self._scheduler.leave_host(request)",
        "tests/test_swap.py::test_a_plan_carries_the_copies_of_a_swap_in[True]",
    ),
    Mutant(
        "index what was never copied",
        "a step that is dropped leaves host blocks in the index that nothing was written to",
        "step.py",
        "                host.forget(block)\n",
        "                continue\n",
        "tests/test_swap.py::test_a_plan_that_is_rolled_back_forgets_what_it_did_not_copy",
    ),
    Mutant(
        "stay swapped out in a dropped step",
        "a victim of a step that is dropped is to come back from host memory, where it never went",
        "step.py",
        "            if request.status is RequestStatus.SWAPPED:\n                self._scheduler.leave_host(request)\n"
        "                request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0",
        "            pass",
        "tests/test_swap.py::test_a_policy_that_fails_after_a_swap_out_has_copied_nothing",
    ),
    Mutant(
        "share host blocks without counting",
        "the first of two victims with a common prefix to come back frees it for both",
        "swap.py",
        "        self.share(known)\n",
        "",
        "tests/test_swap.py::test_full_blocks_that_are_there_already_are_shared",
    ),
    Mutant(
        "forget host blocks at the end",
        "a request that is aborted while it is swapped out keeps its host blocks for ever",
        "scheduler.py",
        "        self.leave_host(request)\n        request.status = RequestStatus.FINISHED",
        "        request.status = RequestStatus.FINISHED",
        "tests/test_swap.py::test_a_request_can_end_while_it_is_swapped_out[abort_all]",
    ),
    Mutant(
        "copy again when a step is run again",
        "the copies to host memory are made again, from blocks that were overwritten meanwhile",
        "engine.py",
        "if self._moves_done < 1 and plan.swap_out_blocks:",
        "if plan.swap_out_blocks:",
        "tests/test_swap_failures.py::test_a_step_that_failed_is_run_again_without_copying_twice[error-execute-True]",
    ),
    Mutant(
        "swap in before swapping out",
        "blocks come back into memory before what is in it was saved",
        "engine.py",
        """        if self._moves_done < 1 and plan.swap_out_blocks:
            self.executor.swap_out(plan.swap_out_blocks)
        self._moves_done = max(self._moves_done, 1)
        if self._moves_done < 2 and plan.swap_in_blocks:
            self.executor.swap_in(plan.swap_in_blocks)
""",
        """        if self._moves_done < 1 and plan.swap_in_blocks:
            self.executor.swap_in(plan.swap_in_blocks)
        self._moves_done = max(self._moves_done, 1)
        if self._moves_done < 2 and plan.swap_out_blocks:
            self.executor.swap_out(plan.swap_out_blocks)
""",
        "tests/test_rules_more.py::test_what_goes_out_is_copied_before_what_comes_in",
    ),
]

SCHEDULER = [
    Mutant(
        "forget to free",
        "a request that ends keeps its blocks and its slot",
        "scheduler.py",
        "            self.running.remove(request)\n            self.release(request)",
        "            self.running.remove(request)",
        "tests/test_parity.py::test_fault_10_blocks_and_seats_come_back_once",
    ),
    Mutant(
        "accept what never fits",
        "a request whose answer outgrows the whole pool is accepted, and stalls later",
        "scheduler.py",
        "if prompt + max_tokens - 1 > capacity:",
        "if prompt > capacity:",
        "tests/test_parity.py::test_fault_09_what_can_never_fit_is_refused_and_a_long_prompt_is_cut",
    ),
    Mutant(
        "keep a slot for the last token",
        "a request that just fits is refused: the last token is never written to the cache",
        "scheduler.py",
        "if prompt + max_tokens - 1 > capacity:",
        "if prompt + max_tokens > capacity:",
        "tests/test_scheduler.py::test_a_request_needs_a_slot_for_every_token_but_the_last",
    ),
    Mutant(
        "one token too many",
        "a request ends one token after max_tokens",
        "scheduler.py",
        "computed + 1 >= request.max_total_tokens",
        "computed >= request.max_total_tokens",
        "tests/test_scheduler.py::test_b024_b139_max_tokens_is_cut_to_the_model_length[6-6]",
    ),
    Mutant(
        "a stop token before the end of sequence",
        "a token that is both ends a request with the wrong reason",
        "scheduler.py",
        "        if token in self.eos_token_ids and not sampling.ignore_eos:\n"
        "            return FinishReason.EOS\n        return",
        "        return",
        "tests/test_scheduler.py::test_b149_the_order_of_the_reasons",
    ),
    Mutant(
        "stop at an ignored end",
        "ignore_eos does not keep a request going",
        "scheduler.py",
        "frozenset[int]() if sampling.ignore_eos else self.eos_token_ids",
        "self.eos_token_ids",
        "tests/test_engine.py::test_b150_ignore_eos_and_a_stop_token_that_is_eos",
    ),
    Mutant(
        "a token for every chunk",
        "whoever computed anything in a step is due a token of it",
        "scheduler.py",
        "            elif computed == len(tokens):",
        "            elif computed:",
        "tests/test_scheduler.py::test_commit_counts_and_appends",
    ),
    Mutant(
        "give out the token of an aborted step",
        "a request that was aborted while its tokens were in flight goes on",
        "scheduler.py",
        "            if to_abort and name in to_abort:\n                self.finish(request, FinishReason.ABORT)\n"
        "                outputs.append(Output(request, None, FinishReason.ABORT))\n            elif",
        "            if",
        "tests/test_scheduler.py::test_abort_with_tokens_in_flight_waits_for_the_commit",
    ),
    Mutant(
        "forget an abort when the step fails",
        "a request that was aborted in a step that failed goes on",
        "scheduler.py",
        "aborted = [request for request in self.requests.values() if request.request_id in self._to_abort]",
        "aborted: list[RunningRequest] = []",
        "tests/test_scheduler.py::test_abort_with_tokens_in_flight_and_a_step_that_fails",
    ),
    Mutant(
        "commit twice",
        "a plan can be committed a second time",
        "scheduler.py",
        "        self._planned = None\n        return step",
        "        return step",
        "tests/test_scheduler.py::test_a_plan_is_committed_once_and_only_the_one_in_flight",
    ),
    Mutant(
        "trust a failed request",
        "what a request computed whose sampling failed stays in the prefix index",
        "scheduler.py",
        "        self.forget_blocks(request, 0)\n        self.finish",
        "        self.finish",
        "tests/test_scheduler.py::test_a_failed_request_leaves_no_content_behind",
    ),
    Mutant(
        "share blocks that are not full",
        "a block enters the prefix index with its first token",
        "scheduler.py",
        "        full = num_tokens // self.config.block_size\n",
        "        full = blocks_needed(num_tokens, self.config.block_size)\n",
        "tests/test_scheduler.py::test_b130_chunks_enter_full_blocks_as_they_are_planned",
    ),
    Mutant(
        "tell the policy of answers only",
        "a policy is not told of the end of a request that never got a token",
        "scheduler.py",
        "            self.policy.on_finish(request)\n",
        "            if request.num_output_tokens:\n                self.policy.on_finish(request)\n",
        "tests/test_scheduler.py::test_every_end_is_told_to_the_policy_once",
    ),
    Mutant(
        "wait for ever",
        "a policy that schedules nothing is never reported",
        "scheduler.py",
        "if self._idle_steps > IDLE_LIMIT:",
        "if self._idle_steps < 0:",
        "tests/test_scheduler.py::test_a_policy_that_never_grants_is_stalled_with_a_diagnosis",
    ),
    Mutant(
        "preempt for ever",
        "tokens that are computed again and again count as progress",
        "scheduler.py",
        "                self._tokens_without_progress += count\n",
        "                self._tokens_without_progress = 0\n",
        "tests/test_scheduler.py::test_after_a_stall_the_guilty_one_can_be_aborted_and_the_others_go_on",
    ),
]

POLICIES = [
    Mutant(
        "evict the oldest",
        "VllmV1 preempts the request that has waited and computed longest",
        "policies.py",
        "return max(step.running, key=_urgency) if self.by_priority else step.running[-1]",
        "return max(step.running, key=_urgency) if self.by_priority else step.running[0]",
        "tests/test_policies.py::test_the_victim_of_first_come_first_served_is_the_newest",
    ),
    Mutant(
        "evict the most urgent",
        "VllmV1 by priority preempts the most urgent request",
        "policies.py",
        "return max(step.running, key=_urgency) if",
        "return min(step.running, key=_urgency) if",
        "tests/test_policies.py::test_priority_skips_nobody_when_a_victim_stood_before",
    ),
    Mutant(
        "let the next one pass",
        "who comes after a request that does not fit is admitted before it",
        "policies.py",
        "        if head in step.victims or not _admit(step, head, fit_whole, hold_whole, spare, at_most):\n"
        "            return",
        "        if head in step.victims:\n            return\n"
        "        queue = list(step.waiting)\n"
        "        if not any(_admit(step, request, fit_whole, hold_whole, spare, at_most) for request in queue):\n"
        "            return",
        "tests/test_policies.py::test_b045_the_queue_is_never_overtaken",
    ),
    Mutant(
        "wait to be whole for ever",
        "with chunking off, a victim that has outgrown the budget is never admitted again",
        "policies.py",
        "return left < num_tokens <= whole and",
        "return left < num_tokens and",
        "tests/test_scheduler.py::test_with_chunking_off_a_preempted_request_that_outgrew_the_budget_resumes[VllmV1]",
    ),
    Mutant(
        "waste the rest of the budget",
        "a prompt waits for a step that it fits in whole, though chunking is on",
        "policies.py",
        "return left < num_tokens <= whole and not step.config.enable_chunked_prefill",
        "return left < num_tokens <= whole",
        "tests/test_parity.py::test_fault_08_a_cut_chunk_takes_what_is_left",
    ),
    Mutant(
        "take memory for the longest answer",
        "blocks for max_tokens are taken at admission, so paging saves nothing",
        "policies.py",
        "fit, hold = (whole if wanted else None for wanted in (fit_whole, hold_whole))",
        "fit, hold = (whole if fit_whole else None, request.max_total_tokens - 1)",
        "tests/test_parity.py::test_fault_07_two_requests_share_memory_that_their_maximum_would_not_fit",
    ),
    Mutant(
        "keep the watermark free for nobody",
        "a prompt that needs the whole pool waits for ever on an empty engine",
        "policies.py",
        "spare if step.running else 0)",
        "spare)",
        "tests/test_policies.py::test_b080_the_watermark_keeps_blocks_free_for_those_who_run",
    ),
    Mutant(
        "stall the decodes",
        "SarathiServe serves ongoing prompts before decodes",
        "policies.py",
        "        self.grant_or_preempt(step, decodes=True)\n        self.grant_or_preempt(step, decodes=False)\n"
        "        if not step.victims:\n            _admit_in_order(step, hold_whole=True",
        "        self.grant_or_preempt(step, decodes=False)\n        self.grant_or_preempt(step, decodes=True)\n"
        "        if not step.victims:\n            _admit_in_order(step, hold_whole=True",
        "tests/test_cli.py::test_recordings_of_policies_that_exist_are_equal[sarathi_serve]",
    ),
    Mutant(
        "join a static batch",
        "StaticBatching admits newcomers while a batch runs",
        "policies.py",
        "            return self.grant_or_preempt(step)\n",
        "            self.grant_or_preempt(step)\n",
        "tests/test_policies.py::test_static_batching_admits_nobody_until_the_last_has_finished",
    ),
    Mutant(
        "mix prefill and decode",
        "NanoVllm decodes in the steps in which it prefills",
        "policies.py",
        "        self._admit_whole_prompts(step)\n",
        "        self._admit_whole_prompts(step)\n        return self.grant_or_preempt(step, decodes=True)\n",
        "tests/cases/test_preemption_and_fairness.py::test_b055_prefill_first_never_mixes_and_the_others_do[NanoVllm-False]",
    ),
    Mutant(
        "send the starved to the front",
        "HfFifo queues its victims at the front",
        "policies.py",
        "step.preempt(request, to_back=True)",
        "step.preempt(request)",
        "tests/test_new_policies.py::test_hf_the_starved_go_to_the_back_newest_first_until_the_rest_fit[HfFifo]",
    ),
    Mutant(
        "admit nobody any more",
        "HfFifo admits nobody new after its first victim, even when a request has finished",
        "policies.py",
        '        """There is room again."""\n        self._admits = True',
        '        """There is room again."""',
        "tests/test_new_policies.py::test_hf_nobody_new_until_one_finishes[HfFifo]",
    ),
    Mutant(
        "read the cache without limit",
        "HfFifo does not count the cached tokens that a step reads",
        "policies.py",
        "                reads_left -= reads\n",
        "                pass\n",
        "tests/test_new_policies.py::test_hf_a_step_reads_no_more_cached_tokens_than_the_pool_holds[HfFifo]",
    ),
    Mutant(
        "reserve the prompt only",
        "Orca with max_tokens reserves nothing for the answer, and has to preempt",
        "policies.py",
        "else request.max_total_tokens - 1\n",
        "else request.num_prompt_tokens\n",
        "tests/test_new_policies.py::test_orca_holds_the_longest_sequence_that_a_request_could_become",
    ),
    Mutant(
        "predict no growth",
        "PeakMemory counts what requests hold now, not what they will hold",
        "policies.py",
        "peak = max(peak, held + alive * blocks_needed(left - 1, block_size))",
        "peak = max(peak, held)",
        "tests/test_new_policies.py::test_peak_memory_waits_where_taking_memory_on_demand_preempts",
    ),
    Mutant(
        "the longest job first",
        "ShortestJobFirst prefers the request with the most work",
        "policies.py",
        "return (work + self.aging * request.arrival_step,)",
        "return (-work + self.aging * request.arrival_step,)",
        "tests/test_new_policies.py::test_shortest_job_first_goes_by_prompt_and_output_and_keeps_the_order_of_equals",
    ),
    Mutant(
        "never grow older",
        "ShortestJobFirst ignores how long a request has waited",
        "policies.py",
        "return (work + self.aging * request.arrival_step,)",
        "return (work,)",
        "tests/test_rules_more.py::test_a_long_job_is_passed_only_by_short_ones_that_come_soon",
    ),
    Mutant(
        "preempt equals",
        "AgedPriority preempts requests that are as urgent as the one that waits",
        "policies.py",
        "if self._urgency(r) > self._urgency(head)]",
        "if self._urgency(r) >= self._urgency(head)]",
        "tests/test_new_policies.py::test_aged_priority_preempts_only_for_a_strictly_more_urgent_one",
    ),
    Mutant(
        "preempt in vain",
        "AgedPriority preempts though even that makes too little room",
        "policies.py",
        "            if enough and tokens and step.seats_left + count > 0:",
        "            if (enough and tokens and step.seats_left + count > 0) or count == len(less_urgent):",
        "tests/cases/test_new_policies.py::test_b072_an_urgent_request_that_could_not_be_made_room_for_evicts_nobody",
    ),
    Mutant(
        "save up while idle",
        "in FairShare, a client that was idle gets everything until it has caught up",
        "policies.py",
        "max(self.service.get(client, 0.0), min(active, default=0.0))",
        "self.service.get(client, 0.0)",
        "tests/test_new_policies.py::test_fair_share_a_client_that_was_idle_has_no_credit",
    ),
    Mutant(
        "give all seats to one",
        "in FairShare, what a client was given in this step does not count yet when the next seat is given",
        "policies.py",
        "            service[client] += step.grants[-1][1]\n",
        "",
        "tests/test_rules_more.py::test_fair_share_gives_the_seats_of_one_step_in_turn",
    ),
    Mutant(
        "charge what was not computed",
        "in FairShare, a client pays for a step that failed and was given up",
        "policies.py",
        "            if request.num_computed_tokens >= end:\n",
        "            if end:\n",
        "tests/test_new_policies.py::test_fair_share_a_step_that_failed_and_was_given_up_costs_nothing",
    ),
]

ENGINE = [
    Mutant(
        "ignore deadlines",
        "a request is served however late it is",
        "engine.py",
        "while self._deadlines and (self._deadlines[0][0] <= self.now() or",
        "while self._deadlines and (",
        "tests/test_liveness.py::test_a_timeout_counts_from_the_arrival",
    ),
    Mutant(
        "a deadline for the name",
        "the deadline of a request that has ended hits the next one with the same id",
        "engine.py",
        "return self.scheduler.requests.get(request.request_id) is not request",
        "return request.request_id not in self.scheduler.requests",
        "tests/test_liveness.py::test_a_deadline_is_that_of_a_request_and_not_of_its_id",
    ),
    Mutant(
        "deliver the last token twice",
        "the last token comes as an event of its own and again with the finish event",
        "engine.py",
        "return [self._end(request, reason or FinishReason.ERROR, record, token, text)]",
        "last = TokenEvent(request.request_id, token, text, None, record.step)\n"
        "            return [last, self._end(request, reason or FinishReason.ERROR, record, token, text)]",
        "tests/test_parity.py::test_fault_11_the_last_token_is_delivered_once",
    ),
    Mutant(
        "ignore stop strings",
        "text goes on behind a stop string",
        "engine.py",
        "        if client.detokenizer.stopped:\n            reason = FinishReason.STOP\n",
        "",
        "tests/test_parity.py::test_fault_11_eos_and_stop_strings_end_a_request_in_a_batch",
    ),
    Mutant(
        "hide a callback's error",
        "a callback that raises is ignored",
        "engine.py",
        "        except Exception as error:  # a callback may raise anything; only its own request ends\n"
        "            client.error = client.error or error",
        "        except Exception:\n            pass",
        "tests/test_engine.py::test_a_callback_that_raises_ends_its_request_alone",
    ),
    Mutant(
        "plan a failed step anew",
        "a step whose forward pass failed is planned again, with the first plan still in flight",
        "engine.py",
        "        if self._pending is None:\n            self._pending,",
        "        if True:\n            self._pending,",
        "tests/test_parity.py::test_fault_11_a_failed_step_is_reported_and_run_again",
    ),
    Mutant(
        "forget an abort from a callback",
        "a waiting request that a callback aborts goes on waiting",
        "engine.py",
        "            self._deferred_aborts.append(request)\n",
        "            pass\n",
        "tests/test_engine.py::test_a_callback_may_add_and_abort",
    ),
    Mutant(
        "compute for a closed stream",
        "closing a stream leaves its request running",
        "engine.py",
        "            self._engine.abort(self.request_id)\n            self._engine",
        "            self._engine",
        "tests/test_engine.py::test_a_stream_is_a_context",
    ),
]

OVERLAP = [
    Mutant(
        "end only who computes nothing",
        "a token ends a request whose next token is being computed, and the step that finds it breaks down",
        "ahead.py",
        "                scheduler.let_go(request)\n                outputs",
        "                outputs",
        "tests/test_overlap.py::test_a_surprising_end_throws_the_token_of_the_next_step_away",
    ),
    Mutant(
        "forget the block of a late token",
        "a block that is filled by a token not yet known never enters the prefix index",
        "ahead.py",
        "                if request.num_in_flight:  # a block",
        "                if False:  # a block",
        "tests/test_overlap.py::test_blocks_that_hold_a_generated_token_are_found_again",
    ),
    Mutant(
        "plan behind the last token",
        "a request that ends by length in the step on its way is planned once more",
        "ahead.py",
        "if end + 1 >= request.max_total_tokens",
        "if end >= request.max_total_tokens",
        "tests/test_overlap.py::test_a_launch_that_fails_does_not_cost_the_tokens_of_the_step_before",
    ),
    Mutant(
        "trust blocks of a failed step",
        "blocks that a failed step should have filled stay in the prefix index",
        "ahead.py",
        "        self._forget_fresh()\n",
        "",
        "tests/test_overlap.py::test_a_failed_result_leaves_nothing_in_the_prefix_cache_and_is_run_again[1]",
    ),
    Mutant(
        "trust blocks of a failed row",
        "blocks of a row of NaN stay in the prefix index if its request gave them back already",
        "ahead.py",
        "            scheduler.pool.forget_free(key)",
        "            pass",
        "tests/test_overlap.py::test_no_content_of_a_failed_row_stays_in_the_cache",
    ),
    Mutant(
        "copy while the device computes",
        "blocks are swapped before the step on its way is done with them",
        "overlap.py",
        "(moves and not flying.wait())",
        "False",
        "tests/test_overlap.py::test_the_same_tokens_as_without_overlap[swap-VllmV1]",
    ),
    Mutant(
        "keep the plan behind a failed step",
        "a step fails, and the one that was planned behind it stays planned",
        "overlap.py",
        "            self._withdraw(following)\n",
        "            pass\n",
        "tests/test_overlap.py::test_a_failed_result_leaves_nothing_in_the_prefix_cache_and_is_run_again[5]",
    ),
    Mutant(
        "record what was thrown away",
        "a record names a request that had ended before its step was committed",
        "overlap.py",
        "        flying.record.drop(flying.gone)\n",
        "",
        "tests/test_overlap.py::test_a_surprising_end_throws_the_token_of_the_next_step_away",
    ),
    Mutant(
        "lose a step for the next one's failure",
        "a launch fails, and the step before it, which succeeded, is given up too",
        "overlap.py",
        "            self._fault = error\n            return None",
        "            raise",
        "tests/test_overlap.py::test_a_launch_that_fails_does_not_cost_the_tokens_of_the_step_before",
    ),
    Mutant(
        "abort a step late",
        "an abort from a callback waits for the step that is on its way",
        "engine.py",
        "        elif request.num_in_flight and self._ahead is None:",
        "        elif request.num_in_flight:",
        "tests/test_overlap.py::test_an_abort_from_a_callback_takes_effect_in_the_same_step",
    ),
]

BANK = [*POOL, *QUEUE_AND_BUDGET, *PLAN, *VERBS, *SWAP, *SCHEDULER, *POLICIES, *ENGINE, *OVERLAP]


def table() -> str:
    """All faults as a table for the documentation."""
    rows = [f"| {mutant.name} | {mutant.what} | `{mutant.file}` | {_link(mutant.caught_by)} |\n" for mutant in BANK]
    return "".join(["| fault | what goes wrong | made in | caught by |\n", "|---|---|---|---|\n", *rows])


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[`{name}`](../{file})"


if __name__ == "__main__":
    print(table(), end="")
