"""Where MiniStack takes a request otherwise than AWS does: what AWS refuses is refused, what MiniStack loses is put in a form
that it keeps. What a policy learns here has to be right at AWS too."""

from __future__ import annotations

from typing import Any

from grpolab.env.aws.command_parser import CommandRefused

MESSAGE_WAIT = 1  # s that receive-message waits at most: nobody else sends to the account meanwhile


def adapted(operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters to send; raises CommandRefused with AWS's error."""
    if operation == "ReceiveMessage":  # always with a wait, since a queue may have a longer one of its own
        return parameters | {"WaitTimeSeconds": min(parameters.get("WaitTimeSeconds", 0), MESSAGE_WAIT)}
    if operation == "CreateQueue" and str(parameters.get("QueueName")).endswith(".fifo"):  # to MiniStack always a FIFO queue
        if parameters.get("Attributes", {}).get("FifoQueue") != "true":
            raise CommandRefused("An error occurred (InvalidParameterValue) when calling the CreateQueue operation: a name "
                                 "with .fifo needs the attribute FifoQueue=true")
    return _alarm(parameters) if operation == "PutMetricAlarm" else parameters


def _alarm(alarm: dict[str, Any]) -> dict[str, Any]:
    """MiniStack takes Average for a statistic that is missing, and forgets Metrics: a single metric there is the same alarm as
    one that names it directly."""
    if sum(name in alarm for name in ("Statistic", "ExtendedStatistic", "Metrics")) != 1:
        raise CommandRefused("An error occurred (ValidationError) when calling the PutMetricAlarm operation: one of Statistic, "
                             "ExtendedStatistic and Metrics must be specified, and only one")
    metrics = alarm.get("Metrics", [])
    if len(metrics) != 1 or "MetricStat" not in metrics[0]:
        return alarm
    metric = metrics[0]["MetricStat"]
    kind = "Statistic" if metric.get("Stat") in ("Average", "Sum", "Minimum", "Maximum", "SampleCount") else "ExtendedStatistic"
    named = {**metric.get("Metric", {}), kind: metric.get("Stat"), "Period": metric.get("Period"), "Unit": metric.get("Unit")}
    rest = {name: value for name, value in alarm.items() if name != "Metrics"}
    return rest | {name: value for name, value in named.items() if value is not None}
