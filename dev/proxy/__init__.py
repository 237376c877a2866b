"""A TCP proxy in front of Kafka brokers that loses, delays and repeats single requests; no part of the product."""

from dev.proxy.injection import Hit, Injection, RequestFault
from dev.proxy.protocol import Api, BrokerRequest
from dev.proxy.proxy import Proxy

__all__ = ["Api", "BrokerRequest", "Hit", "Injection", "Proxy", "RequestFault"]
