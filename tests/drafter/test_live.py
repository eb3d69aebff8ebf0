"""Live drafting: the text keeps the target's law whatever is verified, and the contract of a draft source holds."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch")

from dsim.drafter.corpus import Corpus, generate_corpus  # noqa: E402
from dsim.drafter.drafter import FINAL, DrafterConfig  # noqa: E402
from dsim.drafter.live import EDGE, LiveDrafts  # noqa: E402
from dsim.drafter.prompts import Prompt  # noqa: E402
from dsim.drafter.tiny import tiny_target  # noqa: E402
from dsim.drafter.train import Recipe, Trainer, new_drafter  # noqa: E402
from dsim.drafter.vocabulary import vocabulary_of  # noqa: E402
from dsim.drafts import DraftSource, OnlineCalibration, OnlineSts  # noqa: E402
from dsim.drafts.luck import hash64  # noqa: E402
from dsim.errors import InputError  # noqa: E402

torch.set_num_threads(1)

GAMMA, HEAT, VOCAB = 3, 0.8, 8
PROMPTS = (Prompt("chat", "db", "test"),)  # tokens 1, 6, 4, 1: 6 is none of the drafters' own, 7 is never drafted
KINDS = {
    "markov": ("dspark", "markov", (1, 2, FINAL)),
    "gated": ("dspark", "gated", (2,)),
    "rnn": ("dspark", "rnn", (0, FINAL)),
    "dflash": ("dflash", "none", (1, 2)),
    "eagle3": ("eagle3", "none", (1, 2)),
    "mtp": ("mtp", "none", (FINAL,)),
}


def target(vocab=VOCAB):
    return made_target(vocab)


@cache
def made_target(vocab):
    """Ends one of a hundred answers a token: ends in other numbers cost time, in passes over single prompts."""
    made = tiny_target(seed=5, vocab_size=vocab, num_layers=2, sharpness=1.2)
    made.eos = frozenset({6})
    return made


@pytest.fixture
def ends(monkeypatch):
    """A tenth of the first tokens end an answer."""
    monkeypatch.setattr(target(), "eos", frozenset({0}))


@cache
def drafter(name="markov", gamma=GAMMA, vocab=VOCAB, known=VOCAB - 2):
    """An untrained drafter of some of the tokens whose heads, which start at zero, say something."""
    kind, head, taps = KINDS[name]
    config = DrafterConfig(
        kind=kind,
        gamma=gamma,
        layers=1,
        taps=taps,
        head=head,
        rank=4 if head != "none" else 0,
        vocab_size=known,
        temperature=HEAT,
        shape=target(vocab).shape,
        target=target(vocab).name,
        fingerprint=target(vocab).fingerprint,
    )
    made = new_drafter(config, target(vocab), torch.arange(known), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        made.confidence.linear.weight.normal_(std=0.5, generator=generator)
        if head != "none":
            made.sequential.out.weight.normal_(std=1.0, generator=generator)
    return made.eval()


def live(name="markov", prompts=PROMPTS, vocab=VOCAB, **options):
    kind = options.pop("cls", LiveDrafts)
    return kind(
        target(vocab),
        drafter(name, GAMMA, vocab, vocab - 2 if vocab == VOCAB else 12),
        prompts,
        **{"seed": 5, "max_tokens": 12, **options},
    )


# -- the law of the text ---------------------------------------------------------------------------------


@cache
def law(tokens):
    """The target's law of the next token, from scratch."""
    model = target()
    cache_ = model.new_cache(1, len(tokens))
    _, hidden = model.extend(torch.tensor([tokens]), cache_, torch.zeros(1, dtype=torch.int64))
    return torch.softmax(model.logits(hidden[0, -1]).double() / HEAT, dim=-1).numpy()


def joint(most=256, length=3):
    """float64[V, ..., V]: law of the first output tokens under plain sampling, answer after answer."""
    prompt = tuple(target().tokenizer.chat(PROMPTS[0].text))
    table = np.zeros((VOCAB,) * length)

    def fill(output, text, p):
        if len(output) == length:
            table[output] = p
            return
        for token, q in enumerate(law(text)):
            following = (*text, token)
            ended = token in target().eos or len(following) - len(prompt) >= most
            fill((*output, token), prompt if ended else following, p * q)

    fill((), prompt, 1.0)
    return table


def written(source, requests, policy, length=3):
    """int64[requests, length]: output of requests that are stepped, all together, until they have so many tokens."""
    rng = np.random.default_rng(0)
    numbers = np.arange(requests)
    for number in numbers.tolist():
        source.open(number, 0, 10_000)
    position = np.zeros(requests, dtype=np.int64)
    aged = np.full((requests, source.gamma), 0.5, dtype=np.float32)
    while min(len(source.text(number)) for number in numbers.tolist()) < length:
        confidence, accepted = source.draft(numbers, position)
        lengths = policy(confidence, aged, rng)
        aged = confidence
        gained = np.minimum(accepted, lengths)
        source.observe(numbers, position, lengths, gained)
        position += gained + 1
    return np.stack([source.text(number)[:length] for number in numbers.tolist()])


def p_value(texts, table):
    """Chi-square of the first tokens against their law; rare cells are joined."""
    seen = np.bincount(np.ravel_multi_index(texts.T, table.shape), minlength=table.size)
    expected = table.ravel() * len(texts)
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(seen, expected).pvalue


def full(confidence, aged, rng):
    return np.full(len(confidence), confidence.shape[1])


def nothing(confidence, aged, rng):
    return np.zeros(len(confidence), dtype=np.int64)


def lottery(confidence, aged, rng):
    return rng.integers(0, confidence.shape[1] + 1, len(confidence))


def prefix(confidence, aged, rng):
    """Stop before the first unconfident draft: l looks at c_1 ... c_{l+1}."""
    return np.logical_and.accumulate(confidence >= np.median(confidence), axis=1).sum(axis=1)


def lagged(confidence, aged, rng):
    """Whatever the block before this one said of its last draft, cut or not."""
    return np.where(aged[:, -1] >= np.median(aged[:, -1]), confidence.shape[1], 1)


def anticipating(confidence, aged, rng):
    """Cut everything if the first draft makes the second look bad: l = 0 looks at c_2."""
    return np.where(confidence[:, 1] < np.median(confidence[:, 1]), 0, confidence.shape[1])


POLICIES = (full, nothing, lottery, prefix, lagged)
CASES = [
    pytest.param(name, policy, id=f"{name}-{policy.__name__}", marks=() if quick else pytest.mark.slow)
    for name in KINDS
    for policy in POLICIES
    for quick in [name == "rnn" or (policy is lottery and name in ("markov", "eagle3", "mtp"))]
    if quick or policy in (lottery, prefix)
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_text_has_the_law_of_plain_sampling(name, policy):
    texts = written(live(name, max_rows=4000), 4000, policy)
    assert p_value(texts, joint()) > 1e-3


@pytest.mark.parametrize("policy", [lottery, prefix])
def test_end_tokens_keep_the_law(policy, ends):
    texts = written(live("rnn", max_rows=4000), 4000, policy)
    assert p_value(texts, joint()) > 1e-3


def test_ends_by_length_keep_the_law(ends):
    """Answers of two tokens: the third output token is another answer's first."""
    texts = written(live("rnn", max_rows=4000, max_tokens=2), 4000, lottery)
    table = joint(most=2)
    assert not np.allclose(table, joint())
    assert p_value(texts, table) > 1e-3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A DSpark drafter that has learned a little of the tiny target."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, seed in (("train", 1), ("held", 2)):
        generate_corpus(
            target(),
            [Prompt("chat", text, "test") for text in ("db", "ca", "be", "ad", "e", "ccc")] * 4,
            folder / split,
            split=split,
            taps=(1, 2),
            temperature=HEAT,
            seed=seed,
            shard_size=24,
            max_new_tokens=40,
            rows=24,
            progress=False,
        )
    model = copy.deepcopy(drafter("markov"))
    recipe = Recipe(anchors=3000, sequences=4, anchors_per_sequence=16, learning_rate=5e-3)
    Trainer(model, target(), Corpus(folder / "train"), Corpus(folder / "held"), recipe).run(
        evaluations=1, progress=False
    )
    return model.eval()


def test_a_trained_drafter_is_accepted_more_often_and_is_as_lossless(trained):
    sources = [LiveDrafts(target(), model, PROMPTS, max_rows=4000, max_tokens=12) for model in (trained, drafter())]
    texts = written(sources[0], 4000, prefix)
    assert p_value(texts, joint()) > 1e-3
    means = []
    for source in (sources[1], LiveDrafts(target(), trained, PROMPTS, max_rows=4000, max_tokens=12)):
        for number in range(1000):
            source.open(number, 0, 100)
        means.append(source.draft(np.arange(1000), np.zeros(1000, dtype=np.int64))[1].mean())
    assert means[1] > means[0] + 0.1


class NeverResidual(LiveDrafts):
    """Draws from the target after a rejection too: the rejected draft gets a second chance."""

    def _after(self, block, length):
        return block.fresh[min(length, block.accepted)]


class AlwaysResidual(LiveDrafts):
    """Draws from the residual of the first rejection, verified or not."""

    def _after(self, block, length):
        return block.residual


@pytest.mark.parametrize(
    ("kind", "policy"), [(LiveDrafts, anticipating), (NeverResidual, full), (AlwaysResidual, lottery)]
)
def test_the_chi_square_sees_what_is_not_lossless(kind, policy):
    texts = written(live("rnn", max_rows=4000, cls=kind), 4000, policy)
    assert p_value(texts, joint()) < 1e-6


def expected_accepted(name):
    """Mean accepted drafts of the first block, from all paths: sums of products of min(p_t, p_d)."""
    model, prompt = drafter(name), tuple(target().tokenizer.chat(PROMPTS[0].text))
    vocabulary = vocabulary_of(model.vocabulary_head.tokens, VOCAB, torch.tensor(prompt))
    paths = torch.cartesian_prod(*[torch.arange(vocabulary.size)] * GAMMA)
    layers = tuple(tap for tap in model.config.taps if tap != FINAL)
    total = 0.0
    for first, p_first in enumerate(law(prompt)):
        text = prompt if first in target().eos else (*prompt, first)
        before = torch.tensor([text[:-1]])
        cache_ = target().new_cache(1, len(text))
        features, hidden = target().extend(before, cache_, torch.zeros(1, dtype=torch.int64), layers)
        states = [hidden if tap == FINAL else features[:, :, layers.index(tap)] for tap in model.config.taps]
        laws = []

        def choose(k, probabilities, laws=laws):
            laws.append(probabilities)
            return paths[:, k]

        with torch.inference_mode():
            context = model.prepare(torch.stack(states, dim=2), torch.tensor([text]))
            anchors, seen = torch.full((len(paths),), text[-1]), torch.full((len(paths),), len(text) - 1)
            drafted = model.draft(context, anchors, seen, vocabulary, HEAT, choose).tokens.numpy()
        for k in range(GAMMA):
            # Every prefix once: those whose further tokens are the first of the vocabulary.
            for i in np.flatnonzero((paths[:, k + 1 :] == 0).all(dim=1).numpy()).tolist():
                prefix_tokens = drafted[i, : k + 1].tolist()
                if set(prefix_tokens[:-1]) & target().eos:
                    continue
                p = p_first
                for j, token in enumerate(prefix_tokens):
                    p *= min(float(laws[j][i, paths[i, j]]), law((*text, *prefix_tokens[:j]))[token])
                total += p
    return total


@pytest.mark.parametrize("name", ["markov", "rnn", "eagle3", "mtp"])
def test_accepted_drafts_are_as_many_as_the_two_laws_say(name):
    source = live(name, max_rows=4000)
    for number in range(4000):
        source.open(number, 0, 100)
    _, accepted = source.draft(np.arange(4000), np.zeros(4000, dtype=np.int64))
    error = accepted.std() / np.sqrt(4000)
    assert accepted.mean() == pytest.approx(expected_accepted(name), abs=3.5 * error)


# -- the contract ----------------------------------------------------------------------------------------

WIDE = 24
MANY = tuple(Prompt(domain, text, "test") for domain in ("math", "chat") for text in ("hey you", "xyz", "12 34", "qr"))


def wide(name="markov", **options):
    """Two domains, prompts with other tokens each, and a longer vocabulary."""
    return live(name, MANY, WIDE, **options)


def walk(source, requests, steps=8, alone=False):
    """Texts of some requests after a number of steps, whose verify lengths belong to the request and its position."""
    position = dict.fromkeys(requests, 0)
    for number in requests:
        source.open(number, number % 2, 10_000)
    for _ in range(steps):
        for group in [[number] for number in requests] if alone else [list(requests)]:
            numbers, at = np.array(group), np.array([position[number] for number in group])
            _, accepted = source.draft(numbers, at)
            lengths = hash64(1, numbers, at).astype(np.int64) % (source.gamma + 1)
            source.observe(numbers, at, lengths, np.minimum(accepted, lengths))
            for number, gained in zip(group, np.minimum(accepted, lengths).tolist(), strict=True):
                position[number] += gained + 1
    return {number: source.text(number).tolist() for number in requests}


def test_it_is_a_draft_source():
    source = wide()
    assert isinstance(source, DraftSource)
    assert (source.gamma, source.paired, source.domains) == (GAMMA, False, ("math", "chat"))
    assert source.label == "live:tiny-5 (random weights):dspark:cpu"
    source.open(0, 1, 50)
    confidence, accepted = source.draft(np.array([0]), np.array([0]))
    assert (confidence.dtype, confidence.shape, accepted.dtype, accepted.shape) == (np.float32, (1, 3), np.int64, (1,))
    assert 0 < confidence.min() <= confidence.max() < 1
    assert 0 <= accepted[0] <= GAMMA


def test_the_same_seed_writes_the_same_text():
    first, again, other = (walk(wide(seed=seed), range(6)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", KINDS)
def test_a_request_does_not_see_who_else_is_in_the_batch(name):
    assert walk(wide(name), range(5), steps=6) == walk(wide(name), range(5), steps=6, alone=True)
    # Blocks too, confidences up to rounding.
    one, all_ = wide(name), wide(name)
    for number in range(7):
        one.open(number, number % 2, 100)
        all_.open(number, number % 2, 100)
    zeros = np.zeros(7, dtype=np.int64)
    together = all_.draft(np.arange(7), zeros)
    alone = [one.draft(np.array([number]), zeros[:1]) for number in range(7)]
    np.testing.assert_allclose(together[0], np.concatenate([c for c, _ in alone]), rtol=1e-4)
    np.testing.assert_array_equal(together[1], np.concatenate([a for _, a in alone]))


@pytest.mark.parametrize("name", ["markov", "eagle3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_were_given_up_are_made_again(name, rows):
    small = wide(name, max_rows=rows)
    assert walk(small, range(6)) == walk(wide(name), range(6))
    assert len(small._rows._held) <= rows


def test_memory_grows_with_the_batch_and_ends_with_the_request():
    source = wide(max_rows=64)
    for number in range(5):
        source.open(number, 0, 10_000 if number else 1 + GAMMA)
    source.draft(np.array([0, 1]), np.zeros(2, dtype=np.int64))
    assert source._rows._size == 2
    _, accepted = source.draft(np.arange(5), np.zeros(5, dtype=np.int64))
    assert source._rows._size == 5
    lengths = np.full(5, GAMMA)
    source.observe(np.arange(5), np.zeros(5, dtype=np.int64), lengths, accepted)
    position = int(accepted[0]) + 1
    while position < GAMMA:
        _, more = source.draft(np.array([0]), np.array([position]))
        source.observe(np.array([0]), np.array([position]), lengths[:1], more)
        position += int(more[0]) + 1
    assert 0 not in source._rows._held


def test_asked_again_it_gives_the_same_block():
    source = wide()
    for number in range(3):
        source.open(number, 0, 100)
    at = np.zeros(3, dtype=np.int64)
    first = source.draft(np.arange(3), at)
    # In another batch, in another order, with others' rows given up between.
    again = source.draft(np.array([2, 0]), at[:2])
    np.testing.assert_array_equal(again[0], first[0][[2, 0]])
    np.testing.assert_array_equal(again[1], first[1][[2, 0]])


def test_a_preempted_request_goes_on_where_the_recomputation_left_it():
    """Colocated recompute: the prompt pass draws one more token, which no block was drafted for."""
    source = wide()
    source.open(0, 0, 100)
    one = np.array([0])
    _, accepted = source.draft(one, np.array([0]))
    source.observe(one, np.array([0]), np.array([1]), np.minimum(accepted, 1))
    known = source.text(0).tolist()
    source.draft(one, np.array([len(known) + 1]))
    assert source.text(0).tolist()[: len(known)] == known
    assert len(source.text(0)) == len(known) + 2


def test_tokens_without_drafts_have_the_law_too():
    source = live(max_rows=4000)
    for number in range(4000):
        source.open(number, 0, 100)
    source.draft(np.arange(4000), np.full(4000, 2))
    texts = np.stack([source.text(number) for number in range(4000)])
    assert texts.shape == (4000, 3)
    assert p_value(texts, joint()) > 1e-3


def test_fewer_drafts_are_the_first_ones():
    long, short = wide(), wide(gamma=1)
    assert short.label == "live:tiny-5 (random weights):dspark:first-1-of-3:cpu"
    for source in (long, short):
        for number in range(20):
            source.open(number, 0, 100)
    at = np.zeros(20, dtype=np.int64)
    (c3, a3), (c1, a1) = long.draft(np.arange(20), at), short.draft(np.arange(20), at)
    assert c1.shape == (20, 1)
    np.testing.assert_allclose(c1[:, 0], c3[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(a1, np.minimum(a3, 1))
    # What is committed behind one verified draft is the same: the rest of the block was never there.
    for source, accepted in ((long, a3), (short, a1)):
        source.observe(np.arange(20), at, at + 1, np.minimum(accepted, 1))
    for number in range(20):
        assert long.text(number).tolist() == short.text(number).tolist()


def test_temperatures_divide_the_logits_of_the_confidences():
    plain, cooled = wide(), wide(temperatures=(2.0, 0.5, 1.0))
    for source in (plain, cooled):
        source.open(0, 0, 100)
    one = np.array([0]), np.array([0])
    c, d = (source.draft(*one)[0][0].astype(np.float64) for source in (plain, cooled))
    alive = (c > 2 * EDGE) & (d > 2 * EDGE)
    assert alive.any()
    expected = np.log(c / (1 - c)) / np.array([2.0, 0.5, 1.0])
    np.testing.assert_allclose(np.log(d / (1 - d))[alive], expected[alive], rtol=1e-3, atol=1e-3)


def test_another_temperature_is_in_the_label_and_in_the_text():
    warm = wide(temperature=3.0)
    assert warm.label == "live:tiny-5 (random weights):dspark:T=3:cpu"
    assert walk(warm, range(3)) != walk(wide(), range(3))


def test_drafts_behind_an_end_are_hopeless_and_say_so(ends):
    source = live(max_rows=2000, max_tokens=2)
    for number in range(2000):
        source.open(number, 0, 100)
    confidence, accepted = source.draft(np.arange(2000), np.zeros(2000, dtype=np.int64))
    fresh = np.array([source.text(number)[0] not in target().eos for number in range(2000)])
    # One more token ends an answer that has one; two end one that has none.
    assert accepted[fresh].max() == 1
    assert accepted[~fresh].max() <= 2
    assert (confidence[fresh, 1:] == np.float32(EDGE)).all()
    assert (confidence[:, 2] == np.float32(EDGE)).all()
    drafts = np.array([source._requests[number].block.drafts for number in range(2000)])
    ended = ~fresh & np.isin(drafts[:, 0], list(target().eos))
    assert ended.any()
    assert (accepted[ended] <= 1).all()
    assert (confidence[ended, 1] == np.float32(EDGE)).all()


def test_the_online_calibration_passes_outcomes_on():
    source = OnlineCalibration(wide(), OnlineSts((1.0,) * GAMMA))
    source.open(0, 0, 100)
    one, at = np.array([0]), np.array([0])
    _, accepted = source.draft(one, at)
    source.observe(one, at, np.array([GAMMA]), accepted)
    source.draft(one, at + accepted + 1)
    assert source.label.endswith(":cpu:online-sts")


def test_a_bfloat16_target_works():
    half = tiny_target(vocab_size=VOCAB, num_layers=2)
    half.model.to(torch.bfloat16)
    half.model.head = half.model.embedding
    kind, head, taps = KINDS["markov"]
    config = DrafterConfig(
        kind, GAMMA, 1, taps, head, 4, VOCAB, HEAT, shape=half.shape, target=half.name, fingerprint=half.fingerprint
    )
    source = LiveDrafts(half, new_drafter(config, half, torch.arange(VOCAB), seed=1), PROMPTS, max_tokens=12)
    source.open(0, 0, 100)
    assert source.draft(np.array([0]), np.array([0]))[0].shape == (1, GAMMA)


# -- what is refused -------------------------------------------------------------------------------------


def test_unknown_domains_and_open_requests_are_refused():
    source = wide()
    with pytest.raises(InputError, match=r"unknown domain, got 2, expected one of 0 \(math\), 1 \(chat\)"):
        source.open(0, 2, 10)
    source.open(0, 1, 10)
    with pytest.raises(InputError, match="is open already"):
        source.open(0, 1, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 4}, "drafts blocks of 3, got 4, expected 1 to 3"),
        ({"gamma": 0}, "got 0"),
        ({"temperature": 0.0}, "field 'temperature': got 0.0"),
        ({"temperatures": (1.0,)}, "expected 3 finite numbers > 0"),
        ({"max_rows": 0}, "field 'max_rows': got 0"),
        ({"max_tokens": 0}, "field 'max_tokens': got 0"),
        ({"prompts": ()}, "there are no prompts"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        live(**options)


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(InputError, match="fingerprint"):
        LiveDrafts(tiny_target(seed=4, vocab_size=VOCAB, num_layers=2), drafter(), PROMPTS)


def test_a_later_draft_needs_the_outcome_of_the_one_before():
    source = wide()
    source.open(0, 0, 100)
    one = np.array([0])
    source.draft(one, np.array([3]))
    with pytest.raises(RuntimeError, match=r"position 5, but nobody called observe\(\) .* at position 3"):
        source.draft(one, np.array([5]))
    _, accepted = source.draft(one, np.array([3]))
    with pytest.raises(RuntimeError, match="has no draft at position 2"):
        source.observe(one, np.array([2]), one, one)
    with pytest.raises(RuntimeError, match="is no outcome of request 0's draft at position 3"):
        source.observe(one, np.array([3]), np.array([GAMMA]), accepted + 1)
    source.observe(one, np.array([3]), np.array([0]), np.array([0]))
    with pytest.raises(RuntimeError, match="has no draft at position 3"):
        source.observe(one, np.array([3]), np.array([0]), np.array([0]))
    with pytest.raises(RuntimeError, match="is at position 4 already, not at 2"):
        source.draft(one, np.array([2]))
    with pytest.raises(RuntimeError, match="request 1 is not open"):
        source.draft(np.array([1]), np.array([0]))
    with pytest.raises(RuntimeError, match="twice"):
        source.draft(np.array([0, 0]), np.array([4, 4]))
