"""Tokens become text piece by piece, whole characters only, and stop strings never show."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from npu_llm.errors import ArtifactError, PromptError
from npu_llm.tokenizer import Detokenizer, StopMatcher, Tokenizer

UNKNOWN = "\ufffd"
SAMPLES = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Der schnelle Fuchs läuft über die Straße; größer, schöner, müde.",
    "Быстрая лиса прыгает через ленивую собаку. Привет, мир!",
    "快速的棕色狐狸跳过懒狗。你好,世界!中文中文中文",
    "こんにちは世界。日本語のテキスト。",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "🙂🙂🙃👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 é é",
]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: every token is a string of bytes, some merged across characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer


def byte_strings() -> tokenizers.Tokenizer:
    """Byte-level tokens that begin and end inside characters, as large vocabularies have some."""
    odd = ["80", "E4", "F0", "FF", "80 E4", "B8 AD E4", "E4 B8", "AD", "9F 98 80 F0", "9F", "98 80"]
    odd += ["F0 9F 98", "AD 41", "41 E4", "EF BF BD", "EF BF", "BD EF BF", "C3", "A9 C3", "41"]
    texts = ["".join(CHARACTER_OF[byte] for byte in bytes.fromhex(token)) for token in odd]
    tokenizer = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gpt2_characters() -> dict[int, str]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, others are moved."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(moved)}


CHARACTER_OF = gpt2_characters()


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama style: words begin with ▁, and bytes are tokens of their own."""
    words = ["▁hello", "▁world", "hel", "lo", "▁▁", "ü", "世", "界", "👩", ".", "the"]
    letters = [*"▁abcdefghilmnorstuwxyzE", "é", "世", UNKNOWN]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*letters, *(word for word in words if word not in letters)]
    merges = [("h", "e"), ("l", "o"), ("he", "l"), ("▁", "▁"), ("t", "he")]
    tokens += ["".join(pair) for pair in merges if "".join(pair) not in tokens]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return tokenizer


TOKENIZERS = {
    "byte-level": Tokenizer(byte_level()),
    "byte-fallback": Tokenizer(byte_fallback()),
}
both = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    vocabulary: dict[str, int] = tokenizer._tokenizer.get_vocab()
    return vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(CHARACTER_OF[byte], -1))


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.step(token) for token in ids), detokenizer.flush()]


# Random code points alone hardly ever make the sequences that real text is full of.
sequences = st.sampled_from(
    [
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "🇩🇪",
        "e\u0301",
        "ก็",
        "世界",
        "中文",
        " ",
        "  ",
        "\n",
        UNKNOWN,
        "\u200d",
        "\x00",
        "hello",
    ]
)
unicode_text = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(sequences, st.characters(codec="utf-8")), max_size=25).map("".join),
)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some beyond the vocabulary; or mostly bytes, as a derailed model writes them."""
    bytes_first = st.integers(0, 262)
    return st.one_of(
        st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60),
        st.lists(bytes_first, max_size=60),
    )


# --- Detokenizer -----------------------------------------------------------------------------


@both
@settings(max_examples=300, deadline=None)
@given(text=unicode_text)
def test_the_pieces_of_any_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces) == len(ids) + 1


@settings(max_examples=800, deadline=None)
@given(ids=st.lists(st.integers(0, 19), max_size=60))
def test_the_pieces_of_tokens_that_split_characters_are_their_text(ids: list[int]) -> None:
    tokenizer = Tokenizer(byte_strings())
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=800, deadline=None)
@given(ids=ids_of(TOKENIZERS["byte-level"]))
def test_the_pieces_of_any_byte_level_tokens_are_their_text(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=800, deadline=None)
@given(ids=ids_of(TOKENIZERS["byte-fallback"]))
def test_the_pieces_of_byte_fallback_tokens_are_their_text_where_it_is_text(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    whole, joined = tokenizer.decode(ids), "".join(pieces_of(tokenizer, ids))
    if UNKNOWN in whole:
        # A wrong byte spoils a whole run of bytes, also characters that were already shown.
        assert UNKNOWN in joined
    else:
        assert joined == whole


@both
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_half_a_character_is_waited_for_as_long_as_it_may_become_one(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    detokenizer, waiting = Detokenizer(tokenizer), 0
    for token in data.draw(ids_of(tokenizer)):
        piece = detokenizer.step(token)
        assert waiting >= 4 or not piece.endswith(UNKNOWN)
        waiting = 0 if piece else waiting + tokenizer.has_text(token)
        assert waiting <= 8


@both
def test_a_character_of_several_tokens_appears_once_and_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a𝄞b")
    shown = [piece for piece in pieces_of(tokenizer, ids) if piece]
    assert "𝄞" in "".join(shown)
    assert not any(UNKNOWN in piece for piece in shown)
    assert len(ids) > 3


@both
def test_text_appears_with_its_own_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello hello the hello")
    detokenizer = Detokenizer(tokenizer)
    so_far = ""
    for count, token in enumerate(ids, start=1):
        so_far += detokenizer.step(token)
        assert so_far == tokenizer.decode(ids[:count])


def test_a_leading_space_survives_special_tokens_before_it() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    hello, space = tokenizer.encode("hello")[-1], tokenizer.encode("  ")[0]
    ids = [hello, *[2] * 12, space, hello, 1, space, hello]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_and_unknown_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert pieces_of(tokenizer, [0, 1, tokenizer.vocab_size, 10**6]) == [""] * 5


@pytest.mark.parametrize("text", [UNKNOWN * 30, f"a{UNKNOWN * 9}中{UNKNOWN * 10}b中" * 3])
@both
def test_replacement_characters_of_the_text_itself_are_kept(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_replacement_characters_as_bytes_are_kept() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    for count in range(1, 40):
        ids = [byte_token(tokenizer, byte) for byte in (UNKNOWN * count + "中").encode()]
        assert "".join(pieces_of(tokenizer, ids)) == UNKNOWN * count + "中"


def test_half_a_character_is_kept_when_older_text_is_released() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    unknown = tokenizer.encode(f"a{UNKNOWN}")[-1]
    for count in range(30):
        ids = [unknown] * count + [byte_token(tokenizer, byte) for byte in "🙃中".encode()]
        assert "".join(pieces_of(tokenizer, ids)) == UNKNOWN * count + "🙃中"


def test_a_character_that_was_shown_stays_when_the_next_byte_is_wrong() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = [byte_token(tokenizer, byte) for byte in b"\xc3\xa9\xff"]
    assert tokenizer.decode(ids) == UNKNOWN * 3
    assert pieces_of(tokenizer, ids) == ["", "é", "", UNKNOWN]


@both
@pytest.mark.parametrize("invalid", [b"\xff", b"\xe4", b"\xf0\x9f", b"\x80\xe4"])
def test_endless_invalid_bytes_are_given_at_a_constant_cost(
    tokenizer: Tokenizer, invalid: bytes
) -> None:
    ids = [byte_token(tokenizer, byte) for byte in invalid] * 2000
    detokenizer, longest_wait, wait = Detokenizer(tokenizer), 0, 0
    started = time.perf_counter()
    for token in ids:
        wait = 0 if detokenizer.step(token) else wait + 1
        longest_wait = max(longest_wait, wait)
    assert longest_wait <= 8
    assert len(detokenizer._window) < 32
    assert time.perf_counter() - started < 5  # quadratic would be minutes


@both
def test_after_invalid_bytes_text_is_text_again(tokenizer: Tokenizer) -> None:
    ids = [byte_token(tokenizer, 0xFF)] * 25 + tokenizer.encode("hello world")
    assert "".join(pieces_of(tokenizer, ids)) == UNKNOWN * 25 + tokenizer.decode(ids)[25:]


@both
def test_after_a_flush_a_new_sequence_begins(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    for _ in range(2):
        ids = tokenizer.encode("hello 𝄞")
        text = "".join(detokenizer.step(token) for token in ids[:-1])
        assert text + detokenizer.flush() == tokenizer.decode(ids[:-1])


# --- StopMatcher -----------------------------------------------------------------------------


def naive_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    found = [(text.find(string), len(string), string) for string in stop if string in text]
    if not found:
        return text, None
    place, _, string = min(found)
    return text[:place], string


letters = st.text("ab", max_size=12)


@settings(max_examples=1200, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_what_is_printed_does_not_depend_on_the_pieces(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    printed = "".join([*(matcher.push(piece) for piece in pieces), matcher.flush()])
    assert (printed, matcher.matched) == naive_stop("".join(pieces), stop)


@settings(max_examples=500, deadline=None)
@given(text=letters, stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_only_what_may_begin_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    matcher, printed = StopMatcher(stop), ""
    for count, letter in enumerate(text, start=1):
        printed += matcher.push(letter)
        if matcher.matched is not None:
            return
        held = text[len(printed) : count]
        assert text.startswith(printed)
        assert not held or any(string.startswith(held) for string in stop)


def test_a_stop_string_across_pieces_is_found() -> None:
    matcher = StopMatcher(["</s>", "\n\nUser:"])
    shown = [matcher.push(piece) for piece in ["Hi", " the", "re\n", "\n", "Us", "er: more"]]
    assert shown == ["Hi", " the", "re", "", "", ""]
    assert matcher.matched == "\n\nUser:"
    assert (matcher.push("ignored"), matcher.flush()) == ("", "")


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ["a E", "N", "O", " EN"]] == ["a ", "", "ENO", " "]
    assert (matcher.flush(), matcher.matched) == ("EN", None)


def test_of_stop_strings_at_one_place_the_shortest_counts() -> None:
    matcher = StopMatcher(["abcd", "ab"])
    assert (matcher.push("xabcd"), matcher.matched) == ("x", "ab")


def test_a_stop_string_that_begins_earlier_is_waited_for() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert (matcher.push("abc"), matcher.matched) == ("", None)
    assert (matcher.push("d"), matcher.matched) == ("", "abcd")
    matcher = StopMatcher(["abcd", "bc"])
    assert (matcher.push("abc"), matcher.flush(), matcher.matched) == ("", "a", "bc")


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("text"), matcher.flush(), matcher.matched) == ("text", "", None)


# --- Tokenizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"version": "1.0", "model": 5}'])
def test_a_damaged_file_is_an_artifact_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(
        ArtifactError, match=r"cannot read the tokenizer .*tokenizer\.json"
    ) as error:
        Tokenizer.from_file(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    original = byte_level()
    expected = Tokenizer(byte_level()).encode("hello world, hello there")
    original.enable_truncation(2)
    original.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    original.save(str(path))
    assert json.loads(path.read_text())["truncation"] is not None
    assert Tokenizer.from_file(path).encode("hello world, hello there") == expected


def test_special_tokens_are_added_only_when_asked(tmp_path: Path) -> None:
    original = byte_level()
    original.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    tokenizer = Tokenizer(original)
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *bare]
    assert tokenizer.decode([1, *bare]) == "hello"
    assert tokenizer.vocab_size == original.get_vocab_size()


def test_a_lone_surrogate_is_a_prompt_error() -> None:
    with pytest.raises(PromptError, match="not valid Unicode at character 2: ") as error:
        TOKENIZERS["byte-level"].encode("hi\udc80")
    assert "\n" not in str(error.value)
