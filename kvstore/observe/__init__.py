"""What operators load into Prometheus and Grafana: rules.yml, and a dashboard made from one table. `export` writes both."""

from kvstore.observe.export import export

__all__ = ["export"]
