"""The same run on a Ray cluster: where its processes are placed, and what happens when one of them dies.

    strop train --cluster ──▶ connection ──▶ probe of every node ──▶ plan (or a refusal) ──▶ placement groups
        node A   RankHost ──starts──▶ rank 0 ─┐
        node B   RankHost ──starts──▶ rank 1 ─┴─TCP──▶ the run, in this command: loop, store, gateway
        node A   GatewayHost ──starts──▶ gateway 0 ──TCP──▶ the same
        node B   ServerHost ──starts──▶ vLLM   ◀──HTTP── the run's engine
        node A   RunnerHost ──starts──▶ strop runner ──HTTP──▶ the run's store; its agents: gateway 0
        node B   RunnerHost ──starts──▶ strop runner

Ray only places processes, and notices when a node dies: what is said between them goes over connections of our own. A
host is an actor whose one child dies with it. A runner, a gateway or an engine's server that dies is started again. A
rank that dies ends the run, which is opened again from its last checkpoint, within the same command (training.py).

Nothing else imports ray, and nothing here does before a cluster is asked for.

Left out: an engine's server over several nodes; nodes that do not see the run's folder under the same path (logs and
checkpoints are written there); clusters that add nodes by themselves; encryption: ranks, gateways and runners prove
that they know a secret, but what they say can be read by whoever reads the network.
"""
