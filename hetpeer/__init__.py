"""hetpeer: volunteers' machines train one model together, exactly once under churn.

The rooms, highest first; an import never points up (docs/architecture.md):
`peer` → `bootstrap` → `averaging` → `stages` → `dht`.
"""
