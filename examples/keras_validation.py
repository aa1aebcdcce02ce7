"""Keras learns handwritten digits; each epoch is validated while the next one trains.

    pip install offbeat[keras,demo]
    KERAS_BACKEND=torch python examples/keras_validation.py

With KERAS_BACKEND=tensorflow, TensorFlow computes. Training stops when the validation loss has not fallen for
three epochs, and the best epoch's weights are restored.
"""

import keras
from sklearn.datasets import load_digits

import offbeat
from offbeat.keras import OverlappedValidation


def train(epochs):
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = digits.images[..., None] / 16, digits.target
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    validation = OverlappedValidation(
        images[1200:],
        labels[1200:],
        batch_size=64,
        on_result=lambda epoch, found: print(f"epoch {epoch + 1}: accuracy {found['val_accuracy']:.2%}"),
        monitor=offbeat.EarlyStopping("val_loss", patience=3),
        restore_best_weights=True,
    )
    return model.fit(images[:1200], labels[:1200], epochs=epochs, verbose=0, callbacks=[validation])


if __name__ == "__main__":
    history = train(40).history
    print(f"the best of {len(history['val_loss'])} epochs: loss {min(history['val_loss']):.4f}")
