"""`offbeat.keras.OverlappedValidation`: `fit` is unchanged, metrics are those of `evaluate`.

`make test-keras` runs this file once with torch below Keras and once with TensorFlow.
"""

from __future__ import annotations

import math
import os
import random
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed: make test-keras")

from offbeat import EarlyStopping  # noqa: E402
from offbeat.errors import OffbeatError  # noqa: E402
from offbeat.keras import OverlappedValidation  # noqa: E402
from offbeat.runtime.validation.isolation import GlobalRandomState  # noqa: E402

layers = keras.layers
EPOCHS = 4
CLASSES = 3


def samples(count, seed):
    chance = np.random.default_rng(seed)
    return chance.normal(size=(count, 6)).astype("float32"), chance.integers(CLASSES, size=count)


X, Y = samples(64, 1)
X_VAL, Y_VAL = samples(50, 2)


class Split(keras.Model):
    """Written as a class, with a config of its own."""

    def __init__(self, width=8, **options):
        super().__init__(**options)
        self.width = width
        self.hidden = layers.Dense(width, activation="relu")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(CLASSES)

    def call(self, inputs, training=False):
        return self.out(self.norm(self.hidden(inputs), training=training))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


class Noise(layers.Layer):
    """Draws when it is evaluated, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.chance = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.chance)


def stack(*more):
    return keras.Sequential(
        [
            *(keras.Input((6,)), layers.Dense(8, activation="relu"), layers.BatchNormalization()),
            *(*more, layers.Dropout(0.3), layers.Dense(CLASSES, kernel_regularizer="l2")),
        ]
    )


def noisy():
    return stack(Noise())


def branches():
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.2, seed=1)(layers.Dense(8, activation="relu")(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Concatenate()([inputs, hidden])))


def cross_entropy(labels, logits):
    """A custom loss, whose origin Keras does not know."""
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def compiled(model, **options):
    model.compile("adam", **{"loss": cross_entropy, "metrics": ["accuracy"], **options})
    return model


def a_model(make=stack, **options):
    keras.utils.set_random_seed(0)
    return compiled(make(), **options)


def fit(model, *callbacks, epochs=EPOCHS, **options):
    keras.utils.set_random_seed(1)
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)


def values(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]]


def same(ones, others):
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


def at_epoch_ends(act):
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: act(epoch, logs))


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offbeat validation")]


class Batches(keras.utils.PyDataset):
    """A set in batches of 10, that does something before it returns each one."""

    def __init__(self, before=lambda: None):
        super().__init__()
        self.before = before

    def __len__(self):
        return 5

    def __getitem__(self, batch):
        self.before()
        return X_VAL[batch * 10 : batch * 10 + 10], Y_VAL[batch * 10 : batch * 10 + 10]


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    assert threads() == []


def test_the_backend_is_the_requested_one():
    assert keras.backend.backend() == os.environ.get("KERAS_BACKEND", keras.backend.backend())


# Unchanged training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("make", [stack, branches, Split, noisy])
def test_training_is_bit_for_bit_the_same_as_without_and_metrics_are_those_of_evaluate(make, workers):
    alone, weights = a_model(make), []
    without = fit(alone, at_epoch_ends(lambda epoch, logs: weights.append(values(alone))))
    after_alone = GlobalRandomState()

    model = a_model(make)
    late = OverlappedValidation(X_VAL, Y_VAL, batch_size=8, workers=workers)
    with_it = fit(model, late)

    assert after_alone.changed_generators() == []
    assert same(values(model), values(alone))
    assert {name: with_it.history[name] for name in without.history} == without.history
    if make is noisy and workers > 1:
        return  # parts draw other noise than the whole
    judge = a_model(make)
    judge.evaluate(X_VAL, Y_VAL, verbose=0)  # now it has variables
    for epoch, of_epoch in enumerate(weights):
        for variable, value in zip(judge.variables, of_epoch[: len(judge.variables)], strict=True):
            variable.assign(value)
        expected = judge.evaluate(X_VAL, Y_VAL, batch_size=8, verbose=0, return_dict=True)
        assert late.history[epoch] == pytest.approx(
            {f"val_{name}": value for name, value in expected.items()}, abs=1e-6
        )


def test_the_history_has_an_entry_an_epoch_as_that_of_validation_data_has():
    """In order and without dropout: on torch, Keras's own validation draws from the training's generator."""
    options = {"initial_epoch": 1, "shuffle": False}
    serial = fit(a_model(Split), validation_data=(X_VAL, Y_VAL), validation_batch_size=8, **options)
    late = OverlappedValidation(X_VAL, Y_VAL, batch_size=8)
    overlapped = fit(a_model(Split), late, **options)

    assert overlapped.history.keys() == serial.history.keys()
    for name, found in overlapped.history.items():
        assert found == pytest.approx(serial.history[name], abs=1e-6)
    assert list(late.history) == overlapped.epoch == [1, 2, 3]


def test_a_callback_may_be_used_again():
    late = OverlappedValidation(X_VAL, Y_VAL)
    model = a_model()
    fit(model, late)
    compiled(model, metrics=["sparse_categorical_crossentropy"])
    again = fit(model, late, epochs=2)
    assert list(late.history) == [0, 1]
    assert {"val_loss", "val_sparse_categorical_crossentropy"} == set(late.history[0])
    assert len(again.history["val_loss"]) == 2


def test_several_inputs_are_cut_alike():
    def make():
        one, other = keras.Input((6,), name="one"), keras.Input((6,), name="other")
        return keras.Model({"one": one, "other": other}, layers.Dense(CLASSES)(layers.Add()([one, other])))

    keras.utils.set_random_seed(0)
    model = compiled(make())
    held_out = {"one": X_VAL, "other": 2 * X_VAL}
    late = OverlappedValidation(held_out, Y_VAL, workers=3)
    model.fit({"one": X, "other": 2 * X}, Y, verbose=0, callbacks=[late])
    expected = model.evaluate(held_out, Y_VAL, verbose=0, return_dict=True)
    assert late.history[0] == pytest.approx({f"val_{name}": v for name, v in expected.items()}, abs=1e-6)


def test_each_part_is_read_once_an_epoch():
    class OnDisk:
        shape = X_VAL.shape

        def __getitem__(self, positions):
            read.append((positions.start, positions.stop))
            return X_VAL[positions]

    read = []
    fit(a_model(), OverlappedValidation(OnDisk(), Y_VAL, workers=3), epochs=2)
    assert set(read) == {(0, 17), (17, 34), (34, 50)}


def test_metrics_are_named_as_the_trainings_are():
    """Also where a model before it in the program has had metrics of the same names."""
    options = {"loss": "mse", "metrics": ["AUC", "Recall"]}
    binary = (Y > 0).astype("float32")[:, None]
    for _ in range(2):
        model = a_model(lambda: keras.Sequential([layers.Dense(1, activation="sigmoid")]), **options)
        late = OverlappedValidation(X_VAL, (Y_VAL > 0).astype("float32")[:, None])
        seen = model.fit(X, binary, verbose=0, callbacks=[late])
        names = {name for name in seen.history if not name.startswith("val_")}
        assert {f"val_{name}" for name in names} == set(late.history[0])


# Late metrics -------------------------------------------------------------------------------------------


def test_results_are_reported_in_order_in_the_thread_that_trains():
    reported = []
    late = OverlappedValidation(
        X_VAL,
        Y_VAL,
        on_result=lambda epoch, found: reported.append((epoch, found, threading.current_thread())),
    )
    fit(a_model(), late)
    assert [epoch for epoch, _, _ in reported] == list(range(EPOCHS))
    assert all(found == late.history[epoch] for epoch, found, _ in reported)
    assert {thread for _, _, thread in reported} == {threading.current_thread()}


def test_other_callbacks_see_metrics_with_sync_only():
    for decision in ("lag", "sync"):
        seen = []
        late = OverlappedValidation(X_VAL, Y_VAL, decision=decision)
        fitted = fit(a_model(), late, at_epoch_ends(lambda epoch, logs, seen=seen: seen.append(dict(logs))))
        if decision == "lag":
            assert not any("val_loss" in logs for logs in seen)
        else:
            assert [logs["val_loss"] for logs in seen] == fitted.history["val_loss"]
        assert [late.history[epoch]["val_loss"] for epoch in range(EPOCHS)] == fitted.history["val_loss"]


def test_a_monitor_ends_training_and_the_best_weights_are_restored():
    """The rate is raised after the third epoch so that the loss rises: an early epoch is the best one."""
    weights, monitor = [], EarlyStopping("val_loss", patience=2)
    model = a_model()

    def note(epoch, logs):
        weights.append(model.get_weights())
        if epoch == 2:
            model.optimizer.learning_rate = 3.0

    late = OverlappedValidation(X_VAL, Y_VAL, monitor=monitor, restore_best_weights=True)
    fitted = fit(model, late, at_epoch_ends(note), epochs=50)

    assert late.stopped
    assert len(fitted.epoch) < 50
    losses = fitted.history["val_loss"]
    assert len(losses) == len(fitted.epoch)
    assert monitor.best_epoch == int(np.argmin(losses)) < len(losses) - 1
    best = weights[monitor.best_epoch]
    assert same(model.get_weights(), best)
    assert same(late.best_weights(), best)


def test_without_a_monitor_the_last_weights_stay():
    weights, model = [], a_model()
    late = OverlappedValidation(X_VAL, Y_VAL)
    fit(model, late, at_epoch_ends(lambda epoch, logs: weights.append(model.get_weights())))
    assert same(model.get_weights(), weights[-1])
    with pytest.raises(OffbeatError, match="pass monitor="):
        late.best_weights()


# When validation is slow, or fails ----------------------------------------------------------------------


def test_with_skip_an_epoch_is_not_validated_while_the_maximum_is_under_way():
    may_proceed = threading.Event()
    may_proceed.set()
    epochs = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: may_proceed.clear() if epoch == 0 else None,
        on_epoch_end=lambda epoch, logs: may_proceed.set() if epoch == EPOCHS - 1 else None,
    )
    late = OverlappedValidation(Batches(lambda: may_proceed.wait(60)), max_pending=1, when_full="skip")
    fitted = fit(a_model(), late, epochs)
    assert [late.history[epoch] is None for epoch in range(EPOCHS)] == [False, False, True, True]
    assert [math.isnan(loss) for loss in fitted.history["val_loss"]] == [False, False, True, True]


def test_with_block_training_waits_and_every_epoch_is_validated():
    """A validation proceeds when the next epoch ends, so that every epoch after the first finds one."""
    may_proceed, under_way, most = threading.Event(), [], []
    may_proceed.set()
    late = OverlappedValidation(
        Batches(lambda: may_proceed.wait(60)),
        max_pending=0,
        on_result=lambda epoch, found: under_way.remove(epoch),
    )

    def note(epoch, logs):
        under_way.append(epoch)
        most.append(len(under_way))
        may_proceed.set()

    hold = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: may_proceed.clear())
    fitted = fit(a_model(), hold, at_epoch_ends(note), late)
    assert not any(math.isnan(loss) for loss in fitted.history["val_loss"])
    assert max(most) <= 2  # the one whose end this is, and one before
    assert under_way == []


@pytest.mark.parametrize("max_pending", [0, EPOCHS], ids=["an epoch's end", "training's end"])
def test_a_validation_that_does_not_end_in_time_is_an_error(max_pending):
    may_proceed = threading.Event()
    may_proceed.set()
    hold = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: may_proceed.clear())
    late = OverlappedValidation(Batches(lambda: may_proceed.wait(2)), max_pending=max_pending, timeout_s=0.05)
    with pytest.raises(OffbeatError, match=r"epoch 0 is not done after 0\.05 s: evaluating part 0"):
        fit(a_model(), late, hold)


@pytest.mark.parametrize("epochs", [EPOCHS, 1], ids=["an epoch's end", "training's end"])
def test_an_error_is_raised_with_its_traceback_and_ends_the_threads(epochs):
    is_gone = threading.Event()

    def read_the_disk():
        if is_gone.is_set():
            raise OSError("the disk is gone")

    gone = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: is_gone.set())
    late = OverlappedValidation(Batches(read_the_disk), max_pending=0)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        fit(a_model(), late, gone, epochs=epochs)
    assert "read_the_disk" in "".join(traceback.format_exception(raised.value))
    assert late.history == {}


# Refusals -----------------------------------------------------------------------------------------------


def test_a_set_that_draws_from_shared_generators_is_refused_before_training():
    late = OverlappedValidation(Batches(random.random))
    model = a_model()
    before = model.get_weights()
    with pytest.raises(OffbeatError, match="Python's random module, which all threads share"):
        fit(model, late)
    assert same(model.get_weights(), before)


def test_an_error_of_evaluate_is_raised_when_fit_begins():
    late = OverlappedValidation(X_VAL[:, :4], Y_VAL)
    with pytest.raises(Exception, match=r"4"):
        fit(a_model(), late)


def a_metric(labels, logits):
    return keras.ops.max(logits)


class NoConfig(Split):
    def get_config(self):
        raise TypeError("no config")


@pytest.mark.parametrize(
    ("make", "options"), [(NoConfig, {}), (stack, {"metrics": [a_metric]})], ids=["model", "metric"]
)
def test_a_model_that_keras_cannot_rebuild_is_built_by_a_function(make, options):
    with pytest.raises(OffbeatError, match="pass build="):
        fit(a_model(make, **options), OverlappedValidation(X_VAL, Y_VAL))

    model = a_model(make, **options)
    late = OverlappedValidation(X_VAL, Y_VAL, build=lambda: compiled(make(), **options))
    fit(model, late, epochs=1)
    expected = model.evaluate(X_VAL, Y_VAL, verbose=0, return_dict=True)
    assert late.history[0] == pytest.approx({f"val_{name}": v for name, v in expected.items()}, abs=1e-6)


def test_a_built_model_of_another_shape_is_refused():
    with pytest.raises(OffbeatError, match="variables of the same shapes"):
        fit(a_model(Split), OverlappedValidation(X_VAL, Y_VAL, build=lambda: compiled(Split(width=9))))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"workers": 0}, "1 part, got 50 and 0"),
        ({"max_pending": -1}, "max_pending"),
        ({"when_full": "drop"}, "when_full"),
        ({"decision": "rollback"}, "decision of sync, lag"),
        ({"timeout_s": 0}, "deadline above 0 s"),
        ({"restore_best_weights": True}, "pass monitor="),
    ],
)
def test_arguments_out_of_range_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        OverlappedValidation(X_VAL, Y_VAL, **options)


def test_a_set_that_cannot_be_cut_takes_one_worker():
    with pytest.raises(ValueError, match="leave workers at 1"):
        OverlappedValidation(Batches(), workers=2)


def test_the_example_runs():
    path = Path(__file__).parents[1] / "examples" / "keras_validation.py"
    names = {"__name__": "example"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert len(names["train"](3).history["val_loss"]) == 3
