import json

import numpy as np
import pytest

from anysize.predict import metrics

IGNORE = 255


def pixels_by_hand(targets, predictions):
    """Every valid (true, predicted) pair, one after another."""
    return [
        (int(t), int(p))
        for target, predicted in zip(targets, predictions, strict=True)
        for t, p in zip(target.ravel(), predicted.ravel(), strict=True)
        if t != IGNORE
    ]


def exact_average_precision(scores, labels):
    """The definition itself: a threshold at each distinct score, from the highest down."""
    positives = sum(labels)
    area, last_recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        called = [y for s, y in zip(scores, labels, strict=True) if s >= threshold]
        precision, recall = sum(called) / len(called), sum(called) / positives
        area += (recall - last_recall) * precision
        last_recall = recall
    return area


@pytest.fixture
def streamed():
    """Three images of different sizes with 4 classes, of which the last never occurs."""
    rng = np.random.default_rng(3)
    shapes = [(5, 7), (1, 1), (12, 3)]
    targets = [rng.choice([0, 1, 2, IGNORE], shape).astype(np.int64) for shape in shapes]
    predictions = [rng.integers(0, 3, shape).astype(np.uint8) for shape in shapes]
    confusion = metrics.empty_confusion(4)
    for target, predicted in zip(targets, predictions, strict=True):
        metrics.add_labels(confusion, target, predicted, ignore_index=IGNORE)
    return confusion, pixels_by_hand(targets, predictions)


def test_multiclass_metrics_follow_their_definitions(streamed):
    confusion, pairs = streamed
    result = metrics.multiclass_metrics(confusion, ["a", "b", "c", "never"])
    ious, f1s, recalls = [], [], []
    for c in range(3):
        truth = {i for i, (t, _) in enumerate(pairs) if t == c}
        found = {i for i, (_, p) in enumerate(pairs) if p == c}
        ious.append(len(truth & found) / len(truth | found))
        precision, recall = len(truth & found) / len(found), len(truth & found) / len(truth)
        f1s.append(2 * precision * recall / (precision + recall))
        recalls.append(recall)
    assert list(result["iou"].values()) == [*map(pytest.approx, ious), None]
    assert list(result["f1"].values()) == [*map(pytest.approx, f1s), None]
    assert result["miou"] == pytest.approx(np.mean(ious))
    assert result["mean_f1"] == pytest.approx(np.mean(f1s))
    assert result["class_accuracy"] == pytest.approx(np.mean(recalls))
    assert result["pixel_accuracy"] == pytest.approx(sum(t == p for t, p in pairs) / len(pairs))
    assert result["num_pixels"] == len(pairs)
    assert result["num_images"] == 3


def test_rows_are_true_classes():
    confusion = metrics.empty_confusion(2)
    metrics.add_labels(confusion, np.array([[0, 0, 1]]), np.array([[1, 1, 1]]), ignore_index=IGNORE)
    assert confusion.matrix.tolist() == [[0, 2], [0, 1]]


def test_class_that_is_predicted_but_never_true_counts_as_zero():
    confusion = metrics.empty_confusion(2)
    metrics.add_labels(confusion, np.array([[0, 0]]), np.array([[0, 1]]), ignore_index=IGNORE)
    result = metrics.multiclass_metrics(confusion, ["a", "b"])
    assert result["iou"] == {"a": 0.5, "b": 0.0}
    assert result["miou"] == 0.25
    assert result["class_accuracy"] == 0.5, "recall is not defined for a class that is never true"


def test_without_a_valid_pixel_everything_is_none():
    confusion = metrics.empty_confusion(2)
    metrics.add_labels(
        confusion, np.full((2, 2), IGNORE), np.zeros((2, 2), int), ignore_index=IGNORE
    )
    result = metrics.multiclass_metrics(confusion, ["a", "b"])
    assert result["miou"] is result["pixel_accuracy"] is result["class_accuracy"] is None
    assert result["mean_f1"] is None
    assert result["num_pixels"] == 0


def histograms_of(scores, labels):
    histograms = metrics.empty_histograms(1)
    metrics.add_scores(
        histograms,
        np.asarray(labels, np.uint8).reshape(1, 1, -1),
        np.asarray(scores, np.float32).reshape(1, 1, -1),
        ignore_index=IGNORE,
    )
    return histograms.positives[0], histograms.negatives[0]


@pytest.mark.parametrize("separation", [0.0, 1.0, 6.0])
def test_average_precision_is_the_exact_one_within_its_bound(separation):
    rng = np.random.default_rng(7)
    labels = (rng.random(800) < 0.2).astype(int)
    scores = rng.normal(separation * (labels - 0.5), 1.0).astype(np.float32)
    binned = metrics.average_precision(*histograms_of(scores, labels))
    bound = metrics.average_precision_error(*histograms_of(scores, labels))
    exact = exact_average_precision(scores.tolist(), labels.tolist())
    assert abs(binned - exact) <= bound
    assert abs(binned - exact) < 1e-3


def test_average_precision_bound_is_needed_and_holds_when_all_scores_share_a_bin():
    scores, labels = [0.0005, 0.001, 0.0015, 0.002], [1, 0, 0, 1]
    binned = metrics.average_precision(*histograms_of(scores, labels))
    bound = metrics.average_precision_error(*histograms_of(scores, labels))
    exact = exact_average_precision(scores, labels)
    assert binned == 0.5
    assert exact == 0.75
    assert abs(binned - exact) <= bound <= 0.5


@pytest.mark.parametrize(
    ("labels", "exact", "binned", "bound"),
    [([1, 0, 0, 0], 1.0, 1 / 4, 3 / 4), ([0, 1, 1, 1], 23 / 36, 3 / 4, 2 / 4)],
)
def test_average_precision_bound_counts_positives_and_negatives(labels, exact, binned, bound):
    scores = [0.002, 0.0015, 0.001, 0.0005]
    assert exact_average_precision(scores, labels) == pytest.approx(exact)
    assert metrics.average_precision(*histograms_of(scores, labels)) == binned
    assert metrics.average_precision_error(*histograms_of(scores, labels)) == bound


def test_average_precision_tells_apart_saturated_probabilities():
    """At logits 9 and 11 both probabilities are above 0.9998."""
    assert metrics.average_precision(*histograms_of([11.0, 9.0, 9.0], [1, 0, 0])) == 1.0
    assert metrics.average_precision(*histograms_of([9.0, 11.0, 11.0], [1, 0, 0])) < 0.5


def test_scores_beyond_the_histogram_are_kept():
    positives, negatives = histograms_of([1e9, -1e9], [1, 0])
    assert positives[-1] == negatives[0] == 1


@pytest.mark.parametrize("scale", [1, 40, 3000])
def test_average_precision_of_large_logits(scale):
    """A net in which nothing holds logits small: sure of itself, and still to be ranked."""
    rng = np.random.default_rng(0)
    labels = (rng.random(40_000) < 0.3).astype(int)
    scores = (scale * (rng.normal(size=labels.shape) + 1.5 * (labels - 0.5))).astype(np.float32)
    binned = metrics.average_precision(*histograms_of(scores, labels))
    in_order = labels[np.argsort(-scores, kind="stable")]
    hits = in_order.cumsum()
    exact = float((hits / np.arange(1, len(hits) + 1))[in_order == 1].mean())
    assert exact < 0.8
    bound = metrics.average_precision_error(*histograms_of(scores, labels))
    assert abs(binned - exact) < min(1e-3, bound) < 0.02


def test_bins_rise_with_the_logit():
    logits = np.concatenate([-np.geomspace(1e6, 1e-3, 400), np.geomspace(1e-3, 1e6, 400)])
    bins = [int(histograms_of([x], [1])[0].argmax()) for x in logits.astype(np.float32)]
    assert bins == sorted(bins)
    assert len(set(bins)) > 650


def test_f1_is_exact_at_one_half():
    scores = [0.0, 1e-30, -1e-30, 3.0, -2.0, 5.0]
    labels = [1, 1, 1, 0, 0, 1]
    assert metrics.f1_at_half(*histograms_of(scores, labels)) == 2 * 3 / (2 * 3 + 1 + 1)


def test_multilabel_metrics_ignore_entries_for_each_class_alone():
    target = np.array([[[1, 0, IGNORE]], [[IGNORE, 1, IGNORE]], [[0, 0, IGNORE]]], np.uint8)
    logits = np.array([[[2, 3, 9]], [[-9, 1, 9]], [[-1, -1, 9]]], np.float32)
    histograms = metrics.empty_histograms(3)
    metrics.add_scores(histograms, target, logits, ignore_index=IGNORE)
    result = metrics.multilabel_metrics(histograms, ["a", "b", "c"])
    assert result["average_precision"] == {"a": 0.5, "b": 1.0, "c": None}
    assert result["map"] == 0.75
    assert result["f1"] == {"a": pytest.approx(2 / 3), "b": 1.0, "c": None}
    assert result["mean_f1"] == pytest.approx(5 / 6)
    assert result["num_pixels"] == 2
    assert result["num_images"] == 1


def test_streaming_equals_one_large_image():
    rng = np.random.default_rng(1)
    target = rng.choice([0, 1, IGNORE], (2, 8, 10)).astype(np.uint8)
    logits = rng.normal(0, 3, (2, 8, 10)).astype(np.float32)
    whole, parts = metrics.empty_histograms(2), metrics.empty_histograms(2)
    metrics.add_scores(whole, target, logits, ignore_index=IGNORE)
    metrics.add_scores(parts, target[:, :3], logits[:, :3], ignore_index=IGNORE)
    metrics.add_scores(parts, target[:, 3:], logits[:, 3:], ignore_index=IGNORE)
    assert (whole.positives == parts.positives).all()
    assert (whole.negatives == parts.negatives).all()
    assert whole.num_pixels == parts.num_pixels


def test_results_are_plain_json(streamed):
    result = metrics.multiclass_metrics(streamed[0], ["a", "b", "c", "d"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    empty = metrics.multilabel_metrics(metrics.empty_histograms(1), ["a"])
    assert json.loads(json.dumps(empty, allow_nan=False)) == empty


def test_the_confusion_matrix_and_the_counts_at_half_are_told():
    confusion = metrics.empty_confusion(2)
    metrics.add_labels(
        confusion, np.array([[0, 1, 1, 255]]), np.array([[1, 1, 0, 0]]), ignore_index=255
    )
    assert metrics.multiclass_metrics(confusion, ["a", "b"])["confusion"] == [[0, 1], [1, 1]]
    histograms = metrics.empty_histograms(1)
    target, logits = np.array([[[1, 1, 0, 0, 255]]]), np.array([[[2.0, -1, 0, -3, 5]]])
    metrics.add_scores(histograms, target, logits, ignore_index=255)
    assert metrics.multilabel_metrics(histograms, ["a"])["at_half"] == {"a": [1, 1, 1]}
    assert metrics.iou_at_half(target, logits, ignore_index=255) == pytest.approx(1 / 3)
    absent = np.zeros((1, 1, 5), int)
    assert metrics.iou_at_half(absent, logits - 9, ignore_index=255) is None
