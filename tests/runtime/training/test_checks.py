"""The kinds of `join`'s arguments are checked first; one line names the expected and the given kind."""

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import AllReduce

MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, SGD, AllReduce()), r"expected a model \(torch.nn.Module\) or a list of them, got None"),
        ((SGD, MODEL, AllReduce()), r"expected a model \(torch.nn.Module\) or a list of them, got a SGD"),
        (
            (nn.Linear, SGD, AllReduce()),
            r"expected a model \(torch.nn.Module\) or a list of them, got the class Linear itself",
        ),
        ((MODEL, None, AllReduce()), r"expected an optimizer \(torch.optim.Optimizer\) .*, got None"),
        ((MODEL, list(MODEL.parameters()), AllReduce()), "expected an optimizer .*, got a list of Parameter"),
        ((MODEL, MODEL.parameters(), AllReduce()), "expected an optimizer .*, got a generator"),
        ((MODEL, torch.optim.SGD, AllReduce()), "expected an optimizer .*, got the class SGD itself"),
        ((MODEL, SGD, "bsp"), "expected a strategy .*, got 'bsp'; offbeat.strategies.parse_strategy makes"),
        ((MODEL, SGD, AllReduce), "expected a strategy .*, got the class AllReduce itself"),
        ((MODEL, SGD, None), "expected a strategy .*, got None"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(arguments, expected):
    with pytest.raises(OffbeatError, match=expected):
        offbeat.join(*arguments)
