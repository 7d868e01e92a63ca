// All workspaces of this process.
#include "ffi/symmetric_memory.h"

namespace xen_moe {

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // never destroyed: the driver may go first at exit
  return *registry;
}

void Registry::Configure(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  const MemoryProvider* provider = job.provider ? job.provider : job_.provider;
  Agree agree = job.agree ? std::move(job.agree) : std::move(job_.agree);
  job_ = std::move(job);
  job_.provider = provider;
  job_.agree = std::move(agree);
  configured_ = true;
}

void Registry::SetProvider(const MemoryProvider* provider) {
  std::lock_guard<std::mutex> lock(mutex_);
  job_.provider = provider;
}

void Registry::SetAgree(Agree agree) {
  std::lock_guard<std::mutex> lock(mutex_);
  job_.agree = std::move(agree);
}

std::shared_ptr<Workspace> Registry::Find(std::vector<DeviceKey> devices, int ranks, int channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!configured_) Refuse("the CUDA module was not configured: import xen_moe_jax and load the program through it");
  for (DeviceKey& key : devices) {
    if (key >= 0) continue;
    const size_t index = static_cast<size_t>(-1 - key);
    if (index >= job_.devices.size()) {
      Refuse("the program was lowered for more than the " + std::to_string(job_.devices.size()) +
             " devices of this job");
    }
    key = job_.devices[index];
  }
  std::weak_ptr<Workspace>& slot = workspaces_[{devices, {ranks, channel}}];
  std::shared_ptr<Workspace> found = slot.lock();
  if (!found) {
    found = std::make_shared<Workspace>(job_, std::move(devices), ranks, channel);
    slot = found;
    if (found->across()) kept_.push_back(found);
  }
  return found;
}

std::vector<std::shared_ptr<Workspace>> Registry::All() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Workspace>> out;
  for (auto entry = workspaces_.begin(); entry != workspaces_.end();) {
    std::shared_ptr<Workspace> workspace = entry->second.lock();
    if (workspace) out.push_back(std::move(workspace));
    entry = entry->second.expired() ? workspaces_.erase(entry) : std::next(entry);
  }
  return out;
}

void Registry::ResetAll(double seconds) {
  std::string failed;
  for (auto& workspace : All()) {
    try {
      workspace->Reset(seconds);
    } catch (const MemoryError& e) {  // the others can still be used
      if (failed.empty()) failed = e.message;
    }
  }
  if (!failed.empty()) throw MemoryError{false, failed};
}

void Registry::MarkDead(int process, bool clean) {
  for (auto& workspace : All()) workspace->MarkDead(process, clean);
}

std::string Registry::Failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : workspaces_) {
    const std::shared_ptr<Workspace> workspace = entry.second.lock();
    if (!workspace) continue;
    std::string text = workspace->Failure();
    if (!text.empty()) return text;
  }
  return "";
}

void Registry::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.clear();
  workspaces_.clear();
  job_ = Job{};
  configured_ = false;
}

}  // namespace xen_moe
