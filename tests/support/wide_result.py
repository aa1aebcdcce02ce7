"""A result whose table is wider than a terminal."""

from offbeat.cli.result import Result

RESULT = Result(
    name="allreduce",
    command="python -m benchmarks allreduce",
    kind="timed",
    seed=7,
    figures={"step_s_p50": 0.0125, "push_per_s": 54_321_987, "ratio_to_bound_of_a_long_name_35KB": 1.234e-7},
    rows=[
        {
            "size_bytes": 35_000_000 + at,
            "method": f"a long name of method {at}",
            "note": f"{at}.5%",
        }
        | {f"measured_{place}_s": 1234.5678 * 10**-place + at for place in range(9)}
        for at in range(43)
    ],
)
