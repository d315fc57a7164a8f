#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""old_words_test.py ROOT: no C, C++ or CUDA file uses an identifier that was replaced by the field's term.

A name of several words (RowStream, is_clerk) may not occur in comments either; a plain word (nap, Strip) is looked for in code
only, since it may be English."""

import pathlib
import re
import sys

FOLDERS = ("base", "runtime", "transport", "tools", "tests")
SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cu", ".cuh"}

# Folder prefixes, and the words that do not come back below them.
OLD_WORDS = {
    ("",): """
        TaggedWord TaggedPost TaggedCount TaggedTriple SlotPost kSlotPostBytes slot_posts Tag CallPost kPostWords kStripBytes
        kStripWords strips_of kMostFewTokens kMostFewRows kMostFewRoutes most_few_tokens max_few_tokens few_routes
        few_routes_per_rank few_row_strips few_strips few_tokens few_tokens_ few_slots few_slots_of few_slots_here
        few_scatter_rows few_scatter_weights few_gather_rows few_gather_weights few_scatter_word few_gather_word
        few_scatter_weight few_gather_weight FewSlots FewDispatch FewGather FewRoutes ManyRoutes PrepareWay PrepareBlock
        dispatch_few gather_few gather_few_ragged scatter_few scatter_few_ragged prepare_few prepare_many has_few_routes
        have_all_few_routes mine_are_few has_few_tokens takes_long_way alternates_ways EPX_TEST_ALTERNATES_WAYS
        scatter_arrivals gather_arrivals arrival_at wait_for_arrival tell_arrival tell_arrival_behind_fence Teller teller_
        teller_of_block teller_warps kMostSendersOfTeller untold_ is_clerk Division scatter_division gather_division
        role_of_warp share_among share_of_warps pad_share mover_share turned_index next_item claim_to_send
        claim_to_receive sends_claimed receives_claimed PeerOffers offers_of_block offers_ report_terms
        require_same_terms require_sound_offers others_terms CallTerms make_offer begin_early arrive_alone begin_alone
        sent_alone RowStream stream_of_warp row_stream row_stream_emulated kPieceBytes kMaxPieceBytes spread_row
        begin_to_spread_row spread_units spread_scaled spread_scaled_elements is_ragged kRagged has_ragged_rows
        load_ragged_strip store_ragged_strip Strip StripSum IncomingStrip load_strip store_strip send_strip send_strip_of
        receive_strip staged_strip sum_strip poison_strip poison_row poison_staging poisons_staging
        EPX_TEST_POISONS_STAGING kStretchesOfPiece RunSums add_run place_of_run piece_of load_piece kMostRowParts
        kFewestPieces kMostPrepareBlocks load_whole_relaxed_sys load_whole_acquire_sys store_whole_relaxed_sys kIsWhole
        kNapNs Poison kPoisonSequenceBits kPoisonSequenceMask unpack_poison poison_all poison_here poison_at poison_damage
        poison_failure poison_in_words poison_kernel poison_kernel_address launch_poison report_poison is_sound_poison
        fail_as_poisoned require_not_poisoned abort_in_words in_words progress_told last_arrival_told
        kMostLocalFloorThreads kMostAtOnce kMostMs file_letters file_meeting Reach kNoReach all_rows_in_reach
        has_reachable_rows Introduction stranger_event heads put_head take_head write_heads deliver_heads order_of_slot
        let_go start_line StartLine StartBoard line_up LocalMeeting check_meeting bad_meeting kMeetMs kPoison poison_outputs
        poisoned_rows poisoned_sidecar poisoned_weights poisoned_floats poisoned_like
    """,
    ("runtime/stages/cuda/", "base/device/", "runtime/layout/", "tests/emulation/"): """
        Job Share share_ kStretch kRun nap dawdle order_of strip strips row_strips_ strips_ stream_of_block division teller
        tellers told untold stretch claimed poison poisoned offer offers
    """,
    ("runtime/",): "stranger in_reach own_order num_orders kTerms",
    ("tests/",): "meeting poison poisoned",
    ("transport/bootstrap/", "tests/unit/file"): """
        Letter LetterKind read_letter write_letter begins_like_letter begins_like_older_letter Party party party_ Reception
        reception Guest guests_ guest serve_guest letter letters stranger Stranger strangers_ look_for_strangers
        meet_stranger
    """,
}

COMMENTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def is_plain_word(word):
    return re.fullmatch("[A-Za-z][a-z]*", word) is not None


def findings_of(path, text):
    words = {w for prefixes, table in OLD_WORDS.items() if path.startswith(prefixes) for w in table.split()}
    code = COMMENTS.sub(blank, text)
    for number, (line, code_line) in enumerate(zip(text.split("\n"), code.split("\n")), 1):
        for word in sorted(words & set(re.findall(r"\w+", line))):
            if not is_plain_word(word) or word in re.findall(r"\w+", code_line):
                yield f"{path}:{number}: {word}"


def main():
    root = pathlib.Path(sys.argv[1])
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in SUFFIXES]
    if len(paths) < 100:
        sys.exit(f"only {len(paths)} files are below {root}: is it the source tree?")
    findings = []
    for path in paths:
        findings += findings_of(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    for finding in findings:
        print(finding)
    print(f"{len(paths)} files, {len(findings)} old words")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
