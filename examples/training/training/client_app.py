"""What a hospital does with a message: a few gradient steps on its own rows, or an evaluation on
those held out."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from training import task
from training.discreet import discreet

app = ClientApp(mods=[discreet])


def _own(context: Context) -> tuple[task.Rows, task.Rows]:
    return task.load(context.node_config, str(context.run_config["data-dir"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Plain FedAvg: the model after the local steps goes back."""
    rows, _ = _own(context)
    alpha, steps = float(context.run_config["alpha"]), int(context.run_config["local-steps"])
    w, loss = task.train(message.content.array_records["arrays"]["w"].numpy(), rows, alpha, steps)
    metrics = MetricRecord({"num-examples": len(rows.y), "train_loss": loss})
    return Message(
        RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}), reply_to=message
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Loss and accuracy of the model on rows that no hospital trained on."""
    _, rows = _own(context)
    w = message.content.array_records["arrays"]["w"].numpy()
    found = {"eval_loss": task.loss(w, rows), "eval_acc": task.accuracy(w, rows)}
    return Message(
        RecordDict({"metrics": MetricRecord({"num-examples": len(rows.y), **found})}),
        reply_to=message,
    )
